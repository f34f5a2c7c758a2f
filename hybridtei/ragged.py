"""Ragged arrays: rows of unequal length as one flat array of values and the offsets between them.

The one shape that variable-length data has here, from the tokenizer to the wire. Taking a row is a slice, never a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
Indices = Sequence[int] | NDArray[np.intp]


def offsets_of(lengths: Sequence[int] | NDArray[Any]) -> Offsets:
    """Row lengths int[n] -> offsets int64[n+1], beginning with 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather_index(offsets: Offsets, rows: Indices) -> NDArray[np.int64]:
    """Where in the flat values the given rows lie, in the order of `rows`: int64[sum of their lengths]."""
    picked = np.asarray(rows, dtype=np.intp)
    lengths = np.diff(offsets)[picked]
    first_of_row = offsets[:-1][picked]
    return np.repeat(first_of_row - offsets_of(lengths)[:-1], lengths) + np.arange(lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """`n` rows in `values[t, ...]`; row i is `values[offsets[i]:offsets[i+1]]`."""

    values: NDArray[Any]
    offsets: Offsets

    @classmethod
    def from_rows(cls, rows: Sequence[NDArray[Any]]) -> Ragged:
        """Join at least one row; all must agree in dtype and in all dimensions but the first."""
        return cls(np.concatenate(rows), offsets_of([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.row(i) for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def row(self, i: int) -> NDArray[Any]:
        """A view of row i."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: Indices) -> Ragged:
        """The given rows, in the given order, as a copy."""
        offsets = offsets_of(self.lengths[np.asarray(rows, dtype=np.intp)])
        return Ragged(self.values[gather_index(self.offsets, rows)], offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """One Ragged with the rows of all parts, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))
