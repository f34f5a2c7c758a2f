"""Sparse vectors of a pass: the strongest occurrence of each token, the heaviest entries, some columns left out."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Ids, Offsets, offsets_of
from hybridtei.outputs import Floats, SparseVectors


def strongest(input_ids: Ids, weights: Floats, cu_seqlens: Offsets, removed: Collection[int], width: int) -> SparseVectors:
    """int64[t], float32[t] of `n` sequences -> n sparse vectors over `width` ids, without the removed ids and zeros.

    Source: BGE-M3, Chen et al. 2024, section 3.2 (max over a token's repeats).
    """
    sequence = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    kept = weights > 0
    if removed:
        kept &= ~np.isin(input_ids, list(removed))
    key = sequence[kept] * width + input_ids[kept]
    order = np.argsort(key, kind="stable")
    key, values = key[order], weights[kept][order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    merged = np.maximum.reduceat(values, first) if len(first) else values
    lengths = np.bincount(key[first] // width, minlength=len(cu_seqlens) - 1)
    return SparseVectors(key[first] % width, merged.astype(np.float32), offsets_of(lengths), width)


def heaviest(vectors: SparseVectors, count: int) -> SparseVectors:
    """Return the vectors with at most `count` entries each, those of the largest weights."""
    row = np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr))
    order = np.lexsort((-np.abs(vectors.values), row))  # the rows stay in their places
    kept = np.zeros(len(row), dtype=bool)
    kept[order[np.arange(len(row)) - vectors.indptr[row] < count]] = True
    return _only(vectors, kept)


def without(vectors: SparseVectors, removed: Collection[int]) -> SparseVectors:
    """Return the vectors without some of their columns."""
    return _only(vectors, ~np.isin(vectors.indices, list(removed)))


def _only(vectors: SparseVectors, kept: NDArray[np.bool_]) -> SparseVectors:
    row = np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr))
    lengths = np.bincount(row[kept], minlength=len(vectors))
    return SparseVectors(vectors.indices[kept], vectors.values[kept], offsets_of(lengths), vectors.width)
