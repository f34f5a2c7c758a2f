"""Outputs of `n` sequences as arrays: raw ones of a forward pass, and a caller's (cut, normalised,
merged).

Requests of one pass may need different widths, so a pass returns raw rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import (
    Characters,
    Encoding,
    Head,
    Ids,
    Indices,
    Offsets,
    Ragged,
    gather_index,
    offsets_of,
)
from hybridtei.errors import LoadError, NotANumber

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Floats = NDArray[np.float32]
# The extent of an input that was not cut
WHOLE: Characters = (-2, -2)


@dataclass(frozen=True, slots=True, eq=False)
class SparseVectors:
    """`n` sparse vectors in CSR form. Each row's indices ascend and are unique; no value is 0."""

    indices: NDArray[np.int64]
    values: Floats
    indptr: Offsets
    width: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def row(self, i: int) -> tuple[NDArray[np.int64], Floats]:
        """Return views of row i: (indices, values)."""
        cut = slice(self.indptr[i], self.indptr[i + 1])
        return self.indices[cut], self.values[cut]

    def take(self, rows: Indices) -> SparseVectors:
        """Return a copy of these rows, in this order."""
        at = gather_index(self.indptr, rows)
        lengths = np.diff(self.indptr)[np.asarray(rows, dtype=np.intp)]
        return SparseVectors(self.indices[at], self.values[at], offsets_of(lengths), self.width)

    def part(self, begin: int, end: int) -> SparseVectors:
        """Return views of the rows from `begin` to `end`."""
        first, last = self.indptr[begin], self.indptr[end]
        indptr = self.indptr[begin : end + 1] - first
        return SparseVectors(self.indices[first:last], self.values[first:last], indptr, self.width)

    @staticmethod
    def concat(parts: Sequence[SparseVectors]) -> SparseVectors:
        """Join the rows of all parts, in order."""
        lengths = np.concatenate([np.diff(part.indptr) for part in parts])
        indices = np.concatenate([part.indices for part in parts])
        values = np.concatenate([part.values for part in parts])
        return SparseVectors(indices, values, offsets_of(lengths), parts[0].width)

    @staticmethod
    def from_dense(rows: Floats) -> SparseVectors:
        """float32[n, v] -> its non-zero entries."""
        row, column = np.nonzero(rows)
        lengths = np.bincount(row, minlength=len(rows))
        return SparseVectors(
            column.astype(np.int64), rows[row, column], offsets_of(lengths), rows.shape[1]
        )

    def to_dense(self) -> Floats:
        """Return all rows as float32[n, width]."""
        dense = np.zeros((len(self), self.width), dtype=np.float32)
        dense[np.repeat(np.arange(len(self)), np.diff(self.indptr)), self.indices] = self.values
        return dense

    def to_scipy(self) -> csr_array:
        """Return a `scipy.sparse.csr_array` of shape [n, width] that shares the memory."""
        from scipy.sparse import csr_array

        return csr_array((self.values, self.indices, self.indptr), shape=(len(self), self.width))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Base of records whose columns have one entry a sequence. A missing column is None."""

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        total = 0
        for column in self._columns().values():
            arrays = [column]
            if not isinstance(column, np.ndarray):
                arrays = [getattr(column, field.name) for field in fields(column)]
            total += sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        return total

    def _columns(self) -> dict[str, Any]:
        """The columns that are not None, by name."""
        columns = {}
        for name in self.__dataclass_fields__:
            column = getattr(self, name)
            if column is not None:
                columns[name] = column
        return columns

    def take(self, rows: Indices) -> Self:
        """Return these sequences, in this order."""
        columns = self._columns()
        for name, column in columns.items():
            if isinstance(column, np.ndarray):
                columns[name] = column[np.asarray(rows, dtype=np.intp)]
            else:
                columns[name] = column.take(rows)
        return type(self)(**columns)

    def part(self, begin: int, end: int) -> Self:
        """Return views of the sequences from `begin` to `end`."""
        columns: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            column = getattr(self, name)
            if isinstance(column, np.ndarray):
                columns[name] = column[begin:end]
            elif column is not None:
                columns[name] = column.part(begin, end)
        return type(self)(**columns)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of all parts, in order. A column is kept only if every part has it; no
        parts give no column."""
        if len(parts) < 2:
            return parts[0] if parts else cls()
        columns: dict[str, Any] = {}
        for name, first in parts[0]._columns().items():
            pieces = [getattr(part, name) for part in parts]
            if any(piece is None for piece in pieces):
                continue
            if isinstance(first, np.ndarray):
                columns[name] = np.concatenate(pieces)
            else:
                columns[name] = first.concat(pieces)
        return cls(**columns)


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutputs(Columns):
    """The raw outputs of one pass. A head without a request is None. All floats are float32.

    dense         [n, d]     pooled, projected
    token_weights n × [t_i]  lexical weight of each token, >= 0 (BGE-M3's sparse head)
    splade        n rows     weights over the vocabulary (MLM head)
    multivector   n × [t_i', d']  one vector a kept token
    tokens        n × [t_i, h]    last hidden states
    scores        [n, l]     logits of a reranker or classifier
    tags          n × [t_i, l]    logits of each token
    """

    dense: Floats | None = None
    token_weights: Ragged | None = None
    splade: SparseVectors | None = None
    multivector: Ragged | None = None
    tokens: Ragged | None = None
    scores: Floats | None = None
    tags: Ragged | None = None

    def only(self, heads: frozenset[Head]) -> HeadOutputs:
        """Return only the outputs of these heads, since requests of one pass may need different
        ones."""
        return HeadOutputs(
            dense=self.dense if Head.DENSE in heads else None,
            token_weights=self.token_weights if Head.SPARSE in heads else None,
            splade=self.splade if Head.SPARSE in heads else None,
            multivector=self.multivector if Head.MULTIVECTOR in heads else None,
            tokens=self.tokens if Head.TOKENS in heads else None,
            scores=self.scores if Head.SCORES in heads else None,
            tags=self.tags if Head.TAGS in heads else None,
        )

    def check_finite(self) -> None:
        """Raises NotANumber, with the number of the text, if a vector or a weight is infinite or
        NaN.

        Scores and tags may be infinite: their tasks check them.
        """
        columns: tuple[Any, ...] = (
            self.dense,
            self.token_weights,
            self.splade,
            self.multivector,
            self.tokens,
        )
        for column in columns:
            if column is None:
                continue
            finite = np.isfinite(getattr(column, "values", column))
            if finite.all():
                continue
            text = int(np.argwhere(~finite)[0, 0])
            offsets = getattr(column, "offsets", getattr(column, "indptr", None))
            if offsets is not None:
                text = int(np.searchsorted(offsets, text, "right")) - 1
            raise NotANumber(
                f"the model's output for text {text}, counted from 0, is infinite or NaN"
            )


# A column that the call did not ask for. Typed as the column, since a checker cannot know the
# `outputs` of a call
ABSENT: Any = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Embeddings(Columns):
    """The vectors of a call: each requested column has an entry per input. All floats are float32.

    dense        [n, d]
    sparse       n rows of (indices, values); `sparse.to_scipy()` gives a csr_array
    multivector  n × [t_i, d'], unit rows
    tokens       n × [t_i, h], last hidden states
    extents      int64[n, 2], the first and the last character + 1 of what the model read of an
                 input that was cut; (-1, -1): ids were cut; (-2, -2): nothing was cut
    """

    dense: Floats = ABSENT
    sparse: SparseVectors = ABSENT
    multivector: Ragged = ABSENT
    tokens: Ragged = ABSENT
    extents: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        columns = (self.dense, self.sparse, self.multivector, self.tokens)
        return next(len(column) for column in columns if column is not None)

    def __repr__(self) -> str:
        columns = {**self._columns()}
        columns.pop("extents", None)
        return f"Embeddings({len(self):,} texts: {', '.join(columns)})"

    def row(self, i: int) -> dict[str, Any]:
        """The vectors of input i by name. A sparse one has `indices` and `values`; a multi-vector
        has all its rows, query expansion included."""
        row: dict[str, Any] = {}
        if self.dense is not None:
            row["dense"] = self.dense[i]
        if self.sparse is not None:
            indices, values = self.sparse.row(i)
            row["sparse"] = {"indices": indices, "values": values}
        if self.multivector is not None:
            row["multivector"] = self.multivector.row(i)
        return row

    def save(self, path: str | Path) -> None:
        """Write all columns into a file of numpy's .npz format. Raises OSError."""
        arrays: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if value is None or isinstance(value, np.ndarray):
                arrays[column.name] = value
                continue
            for part in fields(value):
                arrays[f"{column.name}.{part.name}"] = getattr(value, part.name)
        with open(path, "wb") as file:
            np.savez(file, **{name: array for name, array in arrays.items() if array is not None})

    @classmethod
    def load(cls, path: str | Path) -> Embeddings:
        """Read a file that `save` wrote. Raises OSError, and LoadError for a file of another
        kind."""
        kinds: dict[str, type[Any]] = {
            "sparse": SparseVectors,
            "multivector": Ragged,
            "tokens": Ragged,
        }
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            columns = {name: arrays.pop(name, None) for name in ("dense", "extents")}
            for name, kind in kinds.items():
                if any(key.startswith(f"{name}.") for key in arrays):
                    parts = [arrays[f"{name}.{part.name}"] for part in fields(kind)]
                    columns[name] = kind(*(part if part.ndim else part.item() for part in parts))
        except (AttributeError, EOFError, KeyError, TypeError, ValueError, BadZipFile) as error:
            raise LoadError(f"{path}: holds no saved Embeddings: {error}") from error
        return cls(**columns)

    @property
    def truncated(self) -> list[Cut]:
        """The inputs that `Encoder.encode` has cut to the model's length, as the server's
        `usage.truncated` lists them: the place of each, and the characters that the model read."""
        if self.extents is None:
            return []
        rows = np.flatnonzero(self.extents[:, 0] != WHOLE[0]).tolist()
        return [Cut(row, tuple(self.extents[row].tolist())) for row in rows]

    @property
    def numbers(self) -> int:
        """The count of numbers in all columns, indices of sparse vectors included."""
        columns: list[Any] = []
        if self.dense is not None:
            columns.append(self.dense)
        if self.sparse is not None:
            columns += [self.sparse.indices, self.sparse.values]
        for rows in (self.multivector, self.tokens):
            if rows is not None:
                columns.append(rows.values)
        return sum(column.size for column in columns)


SMALLEST_NORM = 1e-12


def unit(rows: Floats) -> Floats:
    """Scale rows to length 1: float32[n, d] -> float32[n, d]. A zero row stays zero. The sum is
    float64, as in TEI."""
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    scale = (1.0 / np.maximum(norms, SMALLEST_NORM)).astype(np.float32)
    return np.asarray(rows * scale[:, None])


def cut(rows: Floats, dimensions: int | None) -> Floats:
    """Return the first `dimensions` columns (Matryoshka). None, or more than there are: all
    columns."""
    return rows if dimensions is None else rows[:, :dimensions]


def refuse_nan(values: Floats) -> Floats:
    """Return the values. Raises NotANumber if one is NaN: half precision can overflow to it, and a
    sort would hide it."""
    if np.isnan(values).any():
        raise NotANumber
    return values


def best_first(scores: Floats) -> NDArray[np.intp]:
    """Return the places of float32[n] in descending order. Ties are reversed, since TEI reverses a
    stable ascending sort."""
    return np.argsort(scores, kind="stable")[::-1]


def max_weights(
    input_ids: Ids, weights: Floats, cu_seqlens: Offsets, removed: Collection[int], width: int
) -> SparseVectors:
    """Ids int64[t] and weights float32[t] of `n` sequences -> n sparse vectors over `width` ids,
    without zeros and removed ids.

    Source: BGE-M3, Chen et al. 2024, section 3.2 (max over a token's repeats).
    """
    sequence = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    mask = weights > 0
    if removed:
        mask &= ~np.isin(input_ids, list(removed))
    key = sequence[mask] * width + input_ids[mask]
    order = np.argsort(key, kind="stable")
    key, values = key[order], weights[mask][order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    merged = np.maximum.reduceat(values, first) if len(first) else values
    lengths = np.bincount(key[first] // width, minlength=len(cu_seqlens) - 1)
    return SparseVectors(key[first] % width, merged.astype(np.float32), offsets_of(lengths), width)


@dataclass(slots=True)
class Timings:
    """A request's times in nanoseconds. Queue and inference are means over its sequences."""

    tokenization_ns: int = 0
    queue_ns: int = 0
    inference_ns: int = 0


@dataclass(slots=True)
class Load:
    """The size of a request: its inputs, their characters, and True if they came as a list."""

    inputs: int
    characters: int
    is_batch: bool


@dataclass(slots=True)
class Cut:
    """An input that was cut: its place, and the characters that the model read, as (first, last +
    1); `UNKNOWN` for ids."""

    index: int
    characters: Characters


def cuts_of(encodings: Sequence[Encoding], size: int) -> list[Cut]:
    """The inputs of a chunk that were cut, each once. Encodings before those of the inputs are the
    query's."""
    cuts: dict[int, Characters] = {}
    place = size
    for encoding in reversed(encodings):
        # Of a text in windows each window knows the place, and the last one where reading ended
        place = getattr(encoding, "document", place - 1)
        if encoding.extent is not None and place >= 0:
            cuts.setdefault(place, encoding.extent)
    return [Cut(place, cuts[place]) for place in sorted(cuts)]


@dataclass(slots=True)
class Usage:
    """The cost of a request: the sums of its inputs' characters and tokens, its times, and the
    inputs that were cut."""

    load: Load
    lengths: list[int]
    timings: Timings
    began_ns: int
    cuts: Sequence[Cut] = ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @staticmethod
    def total(usages: Sequence[Usage]) -> Usage:
        """Return the total of a request that ran the engine several times: sums, and means over all
        inputs."""
        inputs = sum(usage.load.inputs for usage in usages)
        shares = max(inputs, 1)
        return Usage(
            Load(inputs, sum(usage.load.characters for usage in usages), is_batch=True),
            [length for usage in usages for length in usage.lengths],
            Timings(
                sum(usage.timings.tokenization_ns * usage.load.inputs for usage in usages)
                // shares,
                sum(usage.timings.queue_ns * usage.load.inputs for usage in usages) // shares,
                sum(usage.timings.inference_ns * usage.load.inputs for usage in usages) // shares,
            ),
            usages[0].began_ns,
            [cut for usage in usages for cut in usage.cuts],
        )
