"""Tasks: embed, rerank, label and the like, as calculations without I/O."""
