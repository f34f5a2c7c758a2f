"""Smaller vectors: documents' multi-vectors are merged and quantised; sparse vectors keep each
token's strongest occurrence and the heaviest entries; `output_dtype` quantises any vectors. The
modes that pool a text into one vector are in `backends.heads`.

Vectors are merged by Ward's clustering on cosine distances, as in sentence-transformers'
HierarchicalTokenPooling (Clavié et al. 2024, "Reducing the footprint of multi-vector retrieval with
minimal performance impact via token pooling"). Queries are never merged: MaxSim finds a document's
best vector for each vector of the query.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Ragged, offsets_of
from hybridtei.config import ModelConfig, MultivectorDtype
from hybridtei.errors import LoadError
from hybridtei.models.checkpoint.late import TokenPooling
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.options import MultivectorBudget
from hybridtei.outputs import Floats, SparseVectors, unit

# Rows; the clustering's time and memory grow with their square
MAX_MERGED_AT_ONCE = 512
INT8_MOST = 127


def budget_of(config: ModelConfig) -> MultivectorBudget | None:
    """Return the settings' budget; None if it changes no vector."""
    budget = MultivectorBudget(
        max_tokens=config.multivector_tokens or None, dtype=config.multivector_dtype or "float"
    )
    return None if budget.is_full else budget


def budgeted(rows: Ragged, budget: MultivectorBudget) -> Ragged:
    """Merge and quantise raw n × float32[t_i, d] -> unit float32, int8, or uint8[k_i, ceil(d / 8)]
    of bits."""
    if budget.max_tokens is None or int(rows.lengths.max(initial=0)) <= budget.max_tokens:
        return Ragged(_quantized(unit(rows.values), budget.dtype), rows.offsets)
    merged = Ragged.from_rows([merge(row, budget.max_tokens) for row in rows])
    return Ragged(_quantized(unit(merged.values), budget.dtype), merged.offsets)


def merge(rows: Floats, max_rows: int) -> Floats:
    """Merge float32[t, d] to float32[k, d], k <= `max_rows`. Each result is a sum of similar rows,
    so long rows count more.

    Long documents are merged in blocks of `MAX_MERGED_AT_ONCE` until one block remains: time is
    linear in t.
    """
    while len(rows) > max_rows:
        share = max_rows / len(rows)
        if len(rows) > MAX_MERGED_AT_ONCE:
            share = max(0.5, share)
        blocks = np.array_split(rows, -(-len(rows) // MAX_MERGED_AT_ONCE))
        rows = np.concatenate(
            [
                _sums(block, clusters(unit(block), max(1, int(len(block) * share + 1e-9))))
                for block in blocks
            ]
        )
    return rows


def without_marks(rows: Ragged, is_mark: NDArray[np.bool_], max_rows: int) -> Ragged:
    """Remove the rows of punctuation and special tokens from texts with more than `max_rows` rows,
    unless no row would remain.

    A small budget is better spent on words; ColBERT does not score documents' punctuation either.
    `is_mark`: bool[t].
    """
    # The number of marks in each text
    marks = np.diff(offsets_of(is_mark)[rows.offsets])
    loses_marks = (rows.lengths > max_rows) & (marks < rows.lengths)
    return without_rows(rows, is_mark & np.repeat(loses_marks, rows.lengths))


def without_rows(rows: Ragged, is_out: NDArray[np.bool_]) -> Ragged:
    """Remove the rows of `values` where `is_out` bool[t] is True."""
    return Ragged(rows.values[~is_out], offsets_of(~is_out)[rows.offsets])


def clusters(rows: Floats, count: int) -> NDArray[np.int64]:
    """Ward's clusters of unit rows float32[t, d]: each row's cluster int64[t], from 0 to `count` -
    1."""
    if count >= len(rows):
        return np.arange(len(rows))
    # The import takes a third of a second
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distances = np.clip(1 - rows @ rows.T, 0, 2)
    tree = linkage(squareform(distances, checks=False), method="ward")
    labels = fcluster(tree, count, criterion="maxclust")
    # scipy's labels begin at 1, and may skip a number
    numbers: NDArray[np.int64] = np.unique(labels, return_inverse=True)[1]
    return numbers


def pooled(rows: Ragged, pooling: TokenPooling) -> Ragged:
    """Merge n × unit float32[t_i, d] as the checkpoint declares. Its documents are compared by the
    result.

    Above `MAX_MERGED_AT_ONCE` rows each block is merged alone; sentence-transformers compares all
    pairs of rows.
    """
    return Ragged.from_rows([_pooled(row, pooling) for row in rows])


def _pooled(rows: Floats, pooling: TokenPooling) -> Floats:
    protected, rest = rows[: pooling.protected], rows[pooling.protected :]
    blocks = np.array_split(rest, max(-(-len(rest) // MAX_MERGED_AT_ONCE), 1))
    merged = [_means(block, max(int(len(block) // pooling.factor), 1)) for block in blocks]
    rows = np.concatenate([protected, *merged])
    return unit(rows) if pooling.normalize else rows


def _means(rows: Floats, count: int) -> Floats:
    if count >= len(rows):
        return rows
    labels = clusters(rows, count)
    return np.asarray(_sums(rows, labels) / np.bincount(labels)[:, None], np.float32)


def _sums(rows: Floats, labels: NDArray[np.int64]) -> Floats:
    """Sum the rows of each cluster: float32[t, d] -> float32[k, d]."""
    members = (labels == np.arange(int(labels.max(initial=-1)) + 1)[:, None]).astype(np.float32)
    return np.asarray(members @ rows)


def _quantized(rows: Floats, dtype: MultivectorDtype) -> NDArray[Any]:
    if dtype == "binary":
        return quantized(rows, "ubinary")
    if dtype == "int8":
        largest = np.abs(rows).max(axis=-1, keepdims=True, initial=0)
        factors = INT8_MOST / np.where(largest == 0, 1, largest)
        scaled: NDArray[Any] = np.rint(rows * factors).astype(np.int8)
        return scaled
    return rows


def unpacked(bits: NDArray[np.uint8], width: int) -> Floats:
    """Bits uint8[t, ceil(width / 8)] -> unit vectors float32[t, width], each number ±1 /
    sqrt(width)."""
    signs = np.unpackbits(bits, axis=-1, count=width).astype(np.float32)
    # In place, since there may be thousands of rows
    signs *= 2 / np.sqrt(width)
    signs -= 1 / np.sqrt(width)
    return signs


def heaviest(vectors: SparseVectors, count: int) -> SparseVectors:
    """Return the vectors with their `count` largest weights."""
    row = np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr))
    # A stable order keeps the rows apart
    order = np.lexsort((-np.abs(vectors.values), row))
    mask = np.zeros(len(row), dtype=bool)
    mask[order[np.arange(len(row)) - vectors.indptr[row] < count]] = True
    return _only(vectors, mask)


def without(vectors: SparseVectors, removed: Collection[int]) -> SparseVectors:
    """Return the vectors without these columns."""
    return _only(vectors, ~np.isin(vectors.indices, list(removed)))


def _only(vectors: SparseVectors, mask: NDArray[np.bool_]) -> SparseVectors:
    row = np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr))
    lengths = np.bincount(row[mask], minlength=len(vectors))
    return SparseVectors(
        vectors.indices[mask], vectors.values[mask], offsets_of(lengths), vectors.width
    )


def splade_vectors(spec: ModelSpec, vectors: SparseVectors) -> SparseVectors:
    """Apply the model's second logarithm, if it has one. If queries are looked up, remove special
    tokens, since these have no weight."""
    assert spec.sparse is not None
    if spec.sparse.double_log:
        vectors = replace(vectors, values=np.log1p(vectors.values))
    if spec.sparse.active and (spec.pooling or spec.is_splade):
        vectors = heaviest(vectors, spec.sparse.active)
    if spec.sparse.queries is not None:
        vectors = without(vectors, spec.removed_ids)
    return vectors


Precision = Literal["float", "float16", "int8", "uint8", "binary", "ubinary"]
RANGED = frozenset({"int8", "uint8"})
BUCKETS = 255


def quantized(
    rows: Floats, precision: Precision, ranges: Floats | None = None
) -> NDArray[np.generic]:
    """float32[n, d] -> [n, d], or [n, ceil(d / 8)] of bits, most significant first. `ranges`:
    float32[2, d], min and max."""
    if precision == "float":
        return rows
    if precision == "float16":
        return rows.astype(np.float16)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(rows > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    assert ranges is not None
    minima = ranges[0]
    steps = (ranges[1] - minima) / np.float32(BUCKETS)
    places = np.clip(np.floor((rows - minima) / np.where(steps == 0, 1, steps)), 0, BUCKETS)
    if precision == "uint8":
        return np.asarray(places.astype(np.uint8))
    return np.asarray((places - 128).astype(np.int8))


def read_ranges(path: str | Path) -> dict[str, Floats]:
    """Read a `.npz` file with `dense`, `multivector`, and for cut vectors `dense_256` and the like;
    or a `.npy` file with `dense`.

    Raises LoadError.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"dense": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not a file of ranges: {error}") from error
    for name, array in arrays.items():
        if (
            array.ndim != 2
            or len(array) != 2
            or array.dtype.kind != "f"
            or not (array[0] <= array[1]).all()
        ):
            raise LoadError(
                f"{path}: `{name}` should hold the least and the most of each dimension, as floats "
                "[2, d]"
            )
    return {name: array.astype(np.float32) for name, array in arrays.items()}
