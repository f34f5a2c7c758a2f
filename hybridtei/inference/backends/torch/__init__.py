"""Models that torch computes, on a GPU or a CPU: token-wise transformers, the kernels of their attention, and heads."""
