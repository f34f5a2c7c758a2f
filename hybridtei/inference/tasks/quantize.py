"""Quantised vectors: `output_dtype`, and the ranges of dimensions that int8 and uint8 need."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import LoadError
from hybridtei.outputs import Floats

Precision = Literal["float", "float16", "int8", "uint8", "binary", "ubinary"]
RANGED: frozenset[str] = frozenset({"int8", "uint8"})
BUCKETS = 255


def quantized(rows: Floats, precision: Precision, ranges: Floats | None = None) -> NDArray[np.generic]:
    """float32[n, d] -> [n, d], or [n, ceil(d / 8)] of bits, most significant first. `ranges`: float32[2, d], min and max."""
    if precision == "float":
        return rows
    if precision == "float16":
        return rows.astype(np.float16)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(rows > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    assert ranges is not None
    least = ranges[0]
    steps = (ranges[1] - least) / np.float32(BUCKETS)
    places = np.clip(np.floor((rows - least) / np.where(steps == 0, 1, steps)), 0, BUCKETS)
    return np.asarray(places.astype(np.uint8) if precision == "uint8" else (places - 128).astype(np.int8))


def read_ranges(path: str | Path) -> dict[str, Floats]:
    """Read a `.npz` file with `dense`, `multivector`, and for cut vectors `dense_256` and the like; or a `.npy` file with
    `dense`.

    Raises LoadError.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"dense": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not a file of ranges: {error}") from error
    for name, array in arrays.items():
        if array.ndim != 2 or len(array) != 2 or array.dtype.kind != "f" or not (array[0] <= array[1]).all():
            raise LoadError(f"{path}: `{name}` should hold the least and the most of each dimension, as floats [2, d]")
    return {name: array.astype(np.float32) for name, array in arrays.items()}
