"""Collections in Qdrant: fill, search, measure and migrate them."""
