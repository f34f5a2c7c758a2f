"""A tensor's place in the mapping of its file, and adapters of a checkpoint beside its tensors."""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hybridtei.errors import LoadError

# safetensors' names of dtypes, always little-endian.
DTYPES: Mapping[str, DTypeLike] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16"}
# Dtypes of index tables, which are not weights
INTEGERS: Mapping[str, DTypeLike] = {"I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place in the mapping of its file."""

    file: Path
    name: str
    mapping: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    # In elements; None: contiguous rows
    strides: tuple[int, ...] | None = None
    # The shape of `strides`, if it differs
    walked: tuple[int, ...] | None = None

    def array(self, rows: Sequence[int] | None = None) -> NDArray[np.float32]:
        if self.dtype in INTEGERS:
            raise LoadError(
                f"{self.file}: `{self.name}` is {self.dtype}; supported: {', '.join(DTYPES)}"
            )
        values = self.stored()
        # After a header of odd length the values are misaligned and some kernels cannot read them:
        # "A" makes a copy.
        return np.require(values if rows is None else values[list(rows)], np.float32, ["C", "A"])

    def stored(self) -> NDArray[Any]:
        if self.dtype not in DTYPES and self.dtype not in INTEGERS:
            raise LoadError(
                f"{self.file}: `{self.name}` is {self.dtype}; supported: {', '.join(DTYPES)}"
            )
        if self.dtype == "BF16":
            # The import registers the dtype in numpy. It takes 10 ms, which most checkpoints save
            import ml_dtypes  # noqa: F401
        stored = np.dtype(DTYPES.get(self.dtype) or INTEGERS[self.dtype])
        values = np.frombuffer(
            self.mapping, stored, (self.stop - self.start) // stored.itemsize, self.start
        )
        if self.strides is None:
            return values.reshape(self.shape)
        steps = [stride * stored.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(values, self.walked or self.shape, steps).reshape(
            self.shape
        )


def old_name(name: str) -> str:
    """A norm's parameter name in checkpoints converted from TensorFlow."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


def find(tensors: Collection[str], name: str) -> str | None:
    """Return the checkpoint's spelling of a tensor's name, with any prefix, or None. Old BERTs have
    gamma and beta."""
    for spelled in dict.fromkeys((name, old_name(name))):
        if spelled in tensors:
            return spelled
        longer = [key for key in tensors if key.endswith("." + spelled)]
        shorter = [key for key in tensors if spelled.endswith("." + key)]
        matches = sorted(longer, key=len) or sorted(shorter, key=len, reverse=True)
        if matches:
            return matches[0]
    return None


ORIGINAL = re.compile(r"(.+)\.parametrizations\.weight\.original")


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, with adapters as two linear maps beside each adapted
    `NAME.weight`.

    `families.ops.adapted` describes their names and shapes. Raises LoadError.
    """
    weights = dict(tensors)
    for original in [name for name in tensors if ORIGINAL.fullmatch(name)]:
        name = original.removesuffix(".parametrizations.weight.original")
        keys = [f"{name}.parametrizations.weight.0.lora_{letter}" for letter in "AB"]
        weight = weights[f"{name}.weight"] = weights.pop(original)
        missing = [f"`{key}`" for key in keys if key not in weights]
        if missing:
            raise LoadError(f"{weight.file}: `{original}` lacks {' and '.join(missing)}")
        pair = _pair(weight, weights.pop(keys[0]), weights.pop(keys[1]))
        weights |= {
            f"{name}.lora_{letter}.weight": factor
            for letter, factor in zip("AB", pair, strict=True)
        }
    return weights


def _pair(weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(A, B) of all adapters, stacked. A linear map adds B A to its weights, a table adds A B."""
    if len(weight.shape) == 2 and len(a.shape) == len(b.shape) == 3:
        rows, columns = weight.shape
        # A linear map: `a` [count, rank, columns], `b` [count, rows, rank]
        count, rank, width = a.shape
        if (width, b.shape) == (columns, (count, rows, rank)):
            return (
                _laid_out(a, (0, 1, 2), (count * rank, columns)),
                _laid_out(b, (1, 0, 2), (rows, count * rank)),
            )
        # A table: `a` [count, rows, rank], `b` [count, rank, columns]
        count, height, rank = a.shape
        if (height, b.shape) == (rows, (count, rank, columns)):
            return (
                _laid_out(a, (1, 0, 2), (rows, count * rank)),
                _laid_out(b, (2, 0, 1), (columns, count * rank)),
            )
    raise LoadError(
        f"{a.file}: `{a.name}` and `{b.name}` have shapes {list(a.shape)} and {list(b.shape)}, "
        f"which fit no weights of shape {list(weight.shape)}"
    )


def _laid_out(tensor: Tensor, axes: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    strides = tensor.strides or [*_row_after_row(tensor.shape)]
    walked = tuple(tensor.shape[axis] for axis in axes)
    return replace(
        tensor, shape=shape, walked=walked, strides=tuple(strides[axis] for axis in axes)
    )


def _row_after_row(shape: Sequence[int]) -> Sequence[int]:
    return shape[1] * shape[2], shape[2], 1
