"""Ragged arrays, one tokenised input, and many of them packed into one forward pass.

A ragged array is a flat array of values and one of offsets, from the tokenizer to the wire. A row
is a slice, never a copy.

A packed batch has no padding: sequence i is `input_ids[cu_seqlens[i]:cu_seqlens[i+1]]`. Backends
that need a rectangle call `pad()`. Position ids begin at the family's offset (RoBERTa's first token
has position pad_token_id + 1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Head(StrEnum):
    """An output of a forward pass."""

    # Enum's own hash is slow, since it is Python code
    __hash__ = str.__hash__

    DENSE = "dense"
    SPARSE = "sparse"
    MULTIVECTOR = "multivector"
    TOKENS = "tokens"
    SCORES = "scores"
    TAGS = "tags"


class Padding(StrEnum):
    """The part of a pass whose cost grows with the padded rectangle of `n * max_seqlen` tokens."""

    NONE = "none"
    ATTENTION = "attention"
    ALL = "all"


VECTORS = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})
EMBEDDINGS = VECTORS | {Head.TOKENS}


# The first character of a text's part, and the last + 1
Characters = tuple[int, int]
UNKNOWN: Characters = (-1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One tokenised input, special tokens included.

    `extent`: the first and the last character + 1 that a cut left of the text, or of a pair's
    second text; `UNKNOWN` for ids and templates; None: nothing was cut.
    `unseen`: the number of last tokens that attend to all others, but no token attends to them
    (ColBERT's query expansion).
    `adapter`: the number of the model's adapter, 0 for none (`checkpoint.sizes.Adapters`).
    `route`: 1 if the separate model for queries computes it (`checkpoint.modules.Routes`).
    `shared`: the number of first tokens that it shares with other sequences of its request
    (`with_shared_prefix`).
    """

    input_ids: Ids
    token_type_ids: Ids | None = None
    unseen: int = 0
    adapter: int = 0
    shared: int = 0
    route: int = 0
    extent: Characters | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def key(self) -> bytes:
        """Return bytes that are equal if and only if every model gives the encodings the same
        result."""
        ids, types = self.input_ids.tobytes(), self.token_type_ids
        if types is not None and types.any():
            # The lengths of the prefixes, and their sums, differ modulo an id's size, so no two
            # keys collide.
            ids = b"typed" + ids + types.tobytes()
        if self.unseen:
            ids = b"unseen" + self.unseen.to_bytes(4) + ids
        if self.route:
            ids = b"routed" + ids
        if self.adapter:
            ids = b"lora" + self.adapter.to_bytes(8) + ids
        return ids

    @property
    def prefix(self) -> bytes:
        """Return bytes that are equal for encodings with the same `shared` tokens; b"" without
        shared tokens."""
        if not self.shared:
            return b""
        return self.adapter.to_bytes(8) + self.input_ids[: self.shared].tobytes()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LocatedEncoding(Encoding):
    """An encoding with its tokens' places: `offsets` int64[t, 2] in code points of `text`;
    `special` bool[t]."""

    text: str
    offsets: Ids
    special: NDArray[np.bool_]


class WindowPlace(NamedTuple):
    """Where the next window begins: its document, the character, and the document's windows before
    it."""

    document: int = 0
    character: int = 0
    windows: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WindowEncoding(Encoding):
    """One of the windows in which a document is read: the document's place in its chunk, and the
    characters of this window. `is_whole`: these are all. `rest`: where the windows begin that were
    not read with this one, which was the last; None: all were read."""

    document: int
    characters: Characters
    is_whole: bool = False
    rest: WindowPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """`n` sequences of `t` tokens in total: int64[t] arrays, `cu_seqlens` int64[n+1], and the
    requested heads.

    `unseen` int64[n], `adapter_ids` int64[t] and `routes` int64[n]: as in `Encoding`; None if all
    are 0.
    `prefix`: the number of first tokens that all sequences share under causal attention; 0:
    unknown.
    """

    input_ids: Ids
    position_ids: Ids
    token_type_ids: Ids | None
    cu_seqlens: Offsets
    heads: frozenset[Head]
    unseen: Ids | None = None
    adapter_ids: Ids | None = None
    prefix: int = 0
    routes: Ids | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.cu_seqlens)

    def feed(self, inputs: Collection[str]) -> dict[str, Ids]:
        """Return the per-token inputs of a graph with these inputs."""
        feed = {"input_ids": self.input_ids}
        if "position_ids" in inputs:
            feed["position_ids"] = self.position_ids
        columns = {"token_type_ids": self.token_type_ids, "adapter_ids": self.adapter_ids}
        for name, ids in columns.items():
            if name in inputs:
                feed[name] = np.zeros_like(self.input_ids) if ids is None else ids
        return feed

    @property
    def max_seqlen(self) -> int:
        return len(self.input_ids) if len(self) == 1 else int(self.lengths.max(initial=0))


@dataclass(frozen=True, slots=True)
class Positions:
    """A family's position ids: they begin at `offset`. A padding id inside a text has the position
    `padding_id` (RoBERTa)."""

    offset: int = 0
    padding_id: int | None = None

    def of(self, input_ids: Ids, cu_seqlens: Offsets) -> Ids:
        """Return position ids int64[t] for a packed batch."""
        if self.padding_id is None or not (input_ids == self.padding_id).any():
            # The pass of a single text is so short that each numpy call matters
            if len(cu_seqlens) == 2:
                return np.arange(self.offset, self.offset + len(input_ids), dtype=np.int64)
            starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
            return np.arange(len(input_ids), dtype=np.int64) - starts + self.offset
        # RoBERTa counts only ids other than padding (transformers:
        # create_position_ids_from_input_ids).
        is_real = input_ids != self.padding_id
        # The number of real ids before each token of the batch, and in all of it
        counts = np.concatenate(([0], np.cumsum(is_real)))
        before_sequence = np.repeat(counts[cu_seqlens[:-1]], np.diff(cu_seqlens))
        position_ids = counts[1:] - before_sequence - 1 + self.offset
        return np.where(is_real, position_ids, self.padding_id).astype(np.int64)


def pack(
    encodings: Sequence[Encoding], heads: frozenset[Head], positions: Positions, prefix: int = 0
) -> PackedBatch:
    """Join encodings end to end. Each must have at least one token. `prefix`: as in
    `PackedBatch`."""
    if len(encodings) == 1:
        return _alone(encodings[0], heads, positions)
    cu_seqlens = offsets_of([len(encoding.input_ids) for encoding in encodings])
    input_ids = np.concatenate([encoding.input_ids for encoding in encodings])
    unseen = np.array([encoding.unseen for encoding in encodings], dtype=np.int64)
    adapters = np.array([encoding.adapter for encoding in encodings], dtype=np.int64)
    routes = np.array([encoding.route for encoding in encodings], dtype=np.int64)
    return PackedBatch(
        input_ids,
        positions.of(input_ids, cu_seqlens),
        _token_types(encodings),
        cu_seqlens,
        heads,
        unseen if unseen.any() else None,
        np.repeat(adapters, np.diff(cu_seqlens)) if adapters.any() else None,
        prefix,
        routes if routes.any() else None,
    )


def _alone(encoding: Encoding, heads: frozenset[Head], positions: Positions) -> PackedBatch:
    """The batch of one sequence. Makes fewer calls than `pack`, because the pass of one sequence is
    short."""
    input_ids, types = encoding.input_ids.copy(), encoding.token_type_ids
    cu_seqlens = np.array([0, len(input_ids)], dtype=np.int64)
    return PackedBatch(
        input_ids,
        positions.of(input_ids, cu_seqlens),
        None if types is None else types.copy(),
        cu_seqlens,
        heads,
        np.array([encoding.unseen], dtype=np.int64) if encoding.unseen else None,
        np.full(len(input_ids), encoding.adapter, dtype=np.int64) if encoding.adapter else None,
        routes=np.array([encoding.route], dtype=np.int64) if encoding.route else None,
    )


def _token_types(encodings: Sequence[Encoding]) -> Ids | None:
    columns = [encoding.token_type_ids for encoding in encodings]
    if set(map(type, columns)) == {type(None)}:
        return None
    return np.concatenate(
        [
            np.zeros_like(encoding.input_ids)
            if encoding.token_type_ids is None
            else encoding.token_type_ids
            for encoding in encodings
        ]
    )


# For a shorter prefix, computing it again is faster than running a separate batch
MIN_SHARED = 16


def with_shared_prefix(encodings: list[Encoding]) -> list[Encoding]:
    """Return the encodings with `shared` set to the length of their common prefix, if it is long
    enough to pay."""
    if len(encodings) < 2 or any(
        encoding.token_type_ids is not None or encoding.unseen for encoding in encodings
    ):
        return encodings
    first = encodings[0].input_ids
    # Each sequence has at least one token after the prefix
    common = min(map(len, encodings)) - 1
    for encoding in encodings[1:]:
        differences = np.flatnonzero(first[:common] != encoding.input_ids[:common])
        if len(differences):
            common = int(differences[0])
    if common < MIN_SHARED:
        return encodings
    return [replace(encoding, shared=common) for encoding in encodings]


@dataclass(frozen=True, slots=True, eq=False)
class Once:
    """A batch whose common prefix is computed once. `computed` int64[c]: the computed
    tokens, ascending. `rows` int64[t]: for each token of the batch, its index in `computed`."""

    computed: Ids
    rows: Ids


def computed_once(batch: PackedBatch) -> Once | None:
    """Return the tokens of a batch to compute; None: all of them."""
    if not batch.prefix or len(batch) < 2:
        return None
    tokens = np.arange(len(batch.input_ids))
    places = tokens - np.repeat(batch.cu_seqlens[:-1], batch.lengths)
    # The first sequence is computed whole, the others without the prefix
    is_computed = (places >= batch.prefix) | (tokens < batch.cu_seqlens[1])
    rows = np.where(is_computed, np.cumsum(is_computed) - 1, places)
    return Once(np.flatnonzero(is_computed), rows)


def pad(flat: Ids, cu_seqlens: Offsets, fill: int) -> tuple[Ids, NDArray[np.bool_]]:
    """Pad int64[t] on the right with `fill`: -> (int64[n, max_seqlen], mask bool[n,
    max_seqlen])."""
    lengths = np.diff(cu_seqlens)
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, fill, dtype=np.int64)
    padded[mask] = flat
    return padded, mask


def seen_mask(mask: NDArray[np.bool_], batch: PackedBatch) -> NDArray[np.bool_]:
    """Return the mask of tokens in a padded batch that others attend to: bool[n, max_seqlen]."""
    if batch.unseen is None:
        return mask
    return np.asarray(mask & (np.arange(mask.shape[1]) < (batch.lengths - batch.unseen)[:, None]))


def kept_tokens(
    drop: str, input_ids: Ids, cu_seqlens: Offsets, special_ids: Ids
) -> tuple[NDArray[np.bool_], Offsets]:
    """Return the mask bool[t] of tokens that get a vector, and the offsets int64[n+1] of these
    tokens.

    "first" (BGE-M3): all but position 0, the closing special token included. "specials": all but
    special tokens.
    """
    mask = np.ones(len(input_ids), dtype=bool)
    if drop == "first":
        mask[cu_seqlens[:-1]] = False
    elif drop == "specials":
        mask = ~np.isin(input_ids, special_ids)
    counts = np.add.reduceat(mask, cu_seqlens[:-1]) if len(mask) else np.zeros(0)
    return mask, offsets_of(counts.astype(np.int64))


Offsets = NDArray[np.int64]
Indices = Sequence[int] | NDArray[np.intp]


def offsets_of(lengths: Sequence[int] | NDArray[Any]) -> Offsets:
    """Row lengths int[n] -> offsets int64[n+1], starting with 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather_index(offsets: Offsets, rows: Indices) -> NDArray[np.int64]:
    """Return the places int64[sum of lengths] of these rows' values in the flat array, in the order
    of `rows`."""
    indices = np.asarray(rows, dtype=np.intp)
    lengths = np.diff(offsets)[indices]
    # A value's place is its place in the result, moved by as much as its row begins later here
    moves = offsets[:-1][indices] - offsets_of(lengths)[:-1]
    return np.repeat(moves, lengths) + np.arange(lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """`n` rows in `values[t, ...]`; row i is `values[offsets[i]:offsets[i+1]]`."""

    values: NDArray[Any]
    offsets: Offsets

    @classmethod
    def from_rows(cls, rows: Sequence[NDArray[Any]]) -> Ragged:
        """Join at least one row. All must have the same dtype and the same dimensions after the
        first."""
        return cls(np.concatenate(rows), offsets_of([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.row(i) for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def row(self, i: int) -> NDArray[Any]:
        """Return a view of row i."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: Indices) -> Ragged:
        """Return a copy of these rows, in this order."""
        offsets = offsets_of(self.lengths[np.asarray(rows, dtype=np.intp)])
        return Ragged(self.values[gather_index(self.offsets, rows)], offsets)

    def part(self, begin: int, end: int) -> Ragged:
        """Return views of the rows from `begin` to `end`."""
        offsets = self.offsets[begin : end + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """One Ragged with the rows of all parts, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))


def runs(sizes: Sequence[int], limit: int, count: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive runs of items. A run has at most `count` items and a total
    size of at most `limit`; an item larger than `limit` is a run alone."""
    first = total = 0
    for place, size in enumerate(sizes):
        if place > first and (total + size > limit or place - first == count):
            yield first, place
            first, total = place, 0
        total += size
    if first < len(sizes):
        yield first, len(sizes)


def part(batch: PackedBatch, first: int, end: int) -> PackedBatch:
    """Sequences `first` to `end - 1`, as views."""
    start, stop = batch.cu_seqlens[first], batch.cu_seqlens[end]
    types, adapters, unseen = batch.token_type_ids, batch.adapter_ids, batch.unseen
    return replace(
        batch,
        input_ids=batch.input_ids[start:stop],
        position_ids=batch.position_ids[start:stop],
        token_type_ids=None if types is None else types[start:stop],
        adapter_ids=None if adapters is None else adapters[start:stop],
        cu_seqlens=batch.cu_seqlens[first : end + 1] - start,
        unseen=None if unseen is None else unseen[first:end],
        routes=None if batch.routes is None else batch.routes[first:end],
    )


def each(batch: PackedBatch) -> Iterator[PackedBatch]:
    """Split a batch into batches of one sequence."""
    return (part(batch, place, place + 1) for place in range(len(batch)))
