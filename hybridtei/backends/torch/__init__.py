"""Models that torch computes, on a GPU or a CPU."""
