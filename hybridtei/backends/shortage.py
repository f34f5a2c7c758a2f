"""Which errors of torch say that memory does not suffice: those are met with smaller batches, all others are not."""

from __future__ import annotations

import torch

# What torch and its libraries say where memory is short, when they do not raise OutOfMemoryError.
SHORT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_short_of_memory(error: Exception) -> bool:
    """Whether an error says that memory, of the device or of the host, did not suffice."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in SHORT_OF_MEMORY)
