"""The numpy of tasks. Logits -> scores and an order, by TEI's rules: one label is a sigmoid, several a softmax, ties come in
reverse order. Vectors are cut, normalised, compared and quantised."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Ids, Offsets, Ragged, offsets_of
from hybridtei.errors import LoadError, NotANumber
from hybridtei.outputs import Floats, SparseVectors


def probabilities(logits: Floats, *, multi_label: bool = False) -> Floats:
    """float32[n, l] -> float32[n, l]. `multi_label`: each label is judged by itself, as `problem_type` may say."""
    return sigmoid(logits) if multi_label or logits.shape[1] == 1 else softmax(logits)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    from scipy.special import expit

    return np.asarray(expit(x))


def softmax(logits: Floats) -> Floats:
    """Over the last axis; shifted by the largest logit, so that nothing overflows."""
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, whose power is 0
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def refuse_nan(values: Floats) -> Floats:
    """The values. Raises NotANumber if any is none: half precision overflows to it, and a sort would hide it."""
    if np.isnan(values).any():
        raise NotANumber
    return values


def best_first(scores: Floats) -> NDArray[np.intp]:
    """Places of float32[n] in descending order. TEI sorts stably upwards and turns that round: ties in reverse order."""
    return np.argsort(scores, kind="stable")[::-1]


SMALLEST_NORM = 1e-12


def unit(rows: Floats) -> Floats:
    """Rows scaled to length 1: float32[n, d] -> float32[n, d]. A zero row stays zero. The sum runs in float64, as TEI's."""
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    scale = (1.0 / np.maximum(norms, SMALLEST_NORM)).astype(np.float32)
    return np.asarray(rows * scale[:, None])


def cut(rows: Floats, dimensions: int | None) -> Floats:
    """The first `dimensions` columns (Matryoshka); all of them where there are fewer, or for None."""
    return rows if dimensions is None else rows[:, :dimensions]


def cosine(one: Floats, many: Floats) -> Floats:
    """Cosine of float32[d] to each row of float32[n, d]: float32[n]."""
    return np.asarray(unit(many) @ unit(one[None])[0])


Precision = Literal["float", "float16", "int8", "uint8", "binary", "ubinary"]
RANGED: frozenset[str] = frozenset({"int8", "uint8"})
BUCKETS = 255


def quantized(rows: Floats, precision: Precision, ranges: Floats | None = None) -> NDArray[np.generic]:
    """float32[n, d] -> [n, d], or [n, ceil(d / 8)] of bits, most significant first. `ranges`: float32[2, d], least and most."""
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


def ranges_of(rows: Floats) -> Floats:
    """The range of each dimension among these: float32[n, d] -> float32[2, d]."""
    return np.stack([rows.min(axis=0), rows.max(axis=0)])


def read_ranges(path: str | Path) -> dict[str, Floats]:
    """Of a `.npz` file: `dense`, `multivector`, and for vectors that are cut `dense_256` and the like; of a `.npy`: `dense`.

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
