"""Lexical weights of tokens -> one sparse vector a text: the strongest occurrence of each token id counts."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hybridtei.batch import Ids
from hybridtei.outputs import Floats, SparseVectors
from hybridtei.ragged import Offsets, offsets_of


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


def without(vectors: SparseVectors, removed: Collection[int]) -> SparseVectors:
    """The same vectors, less some of their columns."""
    kept = ~np.isin(vectors.indices, list(removed))
    row = np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr))
    lengths = np.bincount(row[kept], minlength=len(vectors))
    return SparseVectors(vectors.indices[kept], vectors.values[kept], offsets_of(lengths), vectors.width)
