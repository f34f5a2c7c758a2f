"""How alike a query and documents are, by each kind of vector: float32[n], one score a document."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridtei.outputs import Floats, SparseVectors
from hybridtei.ragged import Ragged

BLOCK = 4_000_000  # similarities of token vectors that are held at a time


def sparse_dot(query: SparseVectors, documents: SparseVectors) -> Floats:
    """Dot product of the one query with each document."""
    lookup = np.zeros(max(query.width, documents.width), dtype=np.float64)
    indices, values = query.row(0)
    lookup[indices] = values
    row = np.repeat(np.arange(len(documents)), np.diff(documents.indptr))
    products = lookup[documents.indices] * documents.values
    return np.bincount(row, products, minlength=len(documents)).astype(np.float32)


def maxsim(query: Floats, documents: Ragged, *, mean: bool) -> Floats:
    """Sum over the query's unit rows of their best match among a document's: float32[q, d], n × [t_i, d] -> float32[n].

    `mean` divides by the query's rows. A document without a vector has the least score there is, a query without one gives 0.
    Source: ColBERT, Khattab and Zaharia 2020.
    """
    scores = np.zeros(len(documents), dtype=np.float32)
    if not len(query):
        return scores
    lengths = documents.lengths
    scores[lengths == 0] = -len(query)
    for begin, end in _blocks(lengths.tolist(), max(BLOCK // len(query), 1)):
        rows = np.flatnonzero(lengths[begin:end]) + begin
        if len(rows):
            start = documents.offsets[begin]
            alike = query @ documents.values[start : documents.offsets[end]].T
            scores[rows] = np.maximum.reduceat(alike, documents.offsets[rows] - start, axis=1).sum(axis=0, dtype=np.float32)
    return scores / np.float32(len(query)) if mean else scores


def _blocks(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Runs of documents of at most `most` tokens, or of one longer."""
    begin, held = 0, 0
    for place, length in enumerate(lengths):
        if place > begin and held + length > most:
            yield begin, place
            begin, held = place, 0
        held += length
    if begin < len(lengths):
        yield begin, len(lengths)
