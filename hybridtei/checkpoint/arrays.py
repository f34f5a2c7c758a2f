"""Small weight files as float32 arrays: safetensors, or pickles that hold nothing but tensors, which alone need torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.checkpoint.files import require
from hybridtei.checkpoint.finite import check_finite
from hybridtei.errors import LoadError

Arrays = Mapping[str, NDArray[np.float32]]


def read_linear(file: Path) -> Arrays:
    """`weight` and `bias` of a one-layer head. Raises LoadError unless the file holds just these two tensors."""
    arrays = read_arrays(file)
    if set(arrays) != {"weight", "bias"}:
        raise LoadError(f"{file}: holds {sorted(arrays)}, should hold ['bias', 'weight']")
    return arrays


def read_arrays(file: Path) -> Arrays:
    """All tensors of a safetensors file, or of a pickle that holds nothing but tensors. Raises LoadError."""
    require(file)
    try:
        arrays = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except LoadError:
        raise
    except Exception as error:  # each library raises its own kinds, some of them bare
        raise LoadError(f"{file}: cannot be read as weights: {error}") from error
    for name, array in arrays.items():
        check_finite(array, file, name)
    return arrays


def _safetensors(file: Path) -> Arrays:
    import ml_dtypes  # noqa: F401  (teaches numpy bfloat16)
    from safetensors.numpy import load_file

    return {name: np.asarray(array, dtype=np.float32) for name, array in load_file(file).items()}


def _pickled(file: Path) -> Arrays:
    try:
        import torch
    except ImportError as error:
        raise LoadError(f"{file}: reading it needs PyTorch: pip install 'hybridtei[torch]'") from error
    tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise LoadError(f"{file}: should hold a dictionary of tensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}
