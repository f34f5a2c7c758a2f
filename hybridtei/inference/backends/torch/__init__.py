"""torch's backend, on a GPU or a CPU: token-wise transformers, attention kernels, and heads."""
