"""The host's work around a graph of the trunk: the inputs for a batch, and in numpy all heads on
its hidden states.

A graph takes texts end to end or padded to a rectangle; its inputs tell which. Sizes may be rounded
up for runtimes that compile kernels for a shape. The padding is computed and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Ids, Once, PackedBatch, Padding, computed_once, pad, seen_mask
from hybridtei.inference.backends.heads import (
    ENTRIES,
    HeadLayers,
    MlmLayers,
    Product,
    Segments,
    States,
    compute,
    kept_rows,
    outputs_of,
    wants_words,
)
from hybridtei.inference.backends.numpy_functions import NUMPY
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import Floats, HeadOutputs, SparseVectors

Feed = dict[str, NDArray[np.int64]]
# Tokens of a batch; rows and columns of attention's rectangle
Sizes = tuple[int, int, int]
# Only graphs of texts end to end have this input
ROWS = "rows"
# Only causal ones of these have this input
QUERIES = "queries"
# Queries of a row that shares a prefix: each row copies the keys
MIN_QUERIES = 32


def padding_of(inputs: frozenset[str]) -> Padding:
    """The padding of a graph with these inputs."""
    return Padding.ATTENTION if ROWS in inputs else Padding.ALL


def end_to_end(
    batch: PackedBatch,
    inputs: frozenset[str],
    run: Callable[[Feed], Floats],
    grown: Callable[[Sizes], Sizes] = lambda sizes: sizes,
) -> Floats:
    """Run a graph that takes texts end to end: hidden states float32[t, h] of a batch.

    `inputs`: the graph's names. `grown`: rounds sizes up. Attention has a row for each text; tokens
    of a shared prefix are computed once and copied to each row.
    """
    once = computed_once(batch)
    feed = batch.feed(inputs)
    if once is None:
        shape = _Attended.of(batch, grown)
    else:
        shape = _Attended.shared(batch, once, grown)
        feed = {name: values[once.computed] for name, values in feed.items()}
    computed = len(shape.places)
    all_tokens, *_ = grown((computed, *shape.seen.shape))
    feed["places"] = shape.places
    if all_tokens > computed:
        # Repeats of the first token, whose states are dropped
        padding = all_tokens - computed
        feed = {
            name: np.concatenate([values, np.repeat(values[:1], padding)])
            for name, values in feed.items()
        }
    feed |= {ROWS: shape.rows.reshape(-1), "seen": shape.seen}
    if QUERIES in inputs:
        feed |= {QUERIES: shape.queries, "starts": shape.starts}
    hidden = run(feed)[:computed]
    return hidden if once is None else hidden[once.rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Attended:
    """The rectangles of attention, described in `ops`. `rows` and `queries` count only computed
    tokens."""

    places: Ids
    rows: Ids
    seen: Ids
    queries: Ids
    starts: Ids

    @classmethod
    def of(cls, batch: PackedBatch, grown: Callable[[Sizes], Sizes]) -> _Attended:
        """A row for each text, with the same tokens as queries and keys."""
        _, n, longest = grown((len(batch.input_ids), len(batch), batch.max_seqlen))
        places, rows, seen = _rectangle(batch, n, longest)
        rows = rows.reshape(n, longest)
        return cls(places, rows, seen, rows, np.zeros(n, dtype=np.int64))

    @classmethod
    def shared(cls, batch: PackedBatch, once: Once, grown: Callable[[Sizes], Sizes]) -> _Attended:
        """A row for each text, with the prefix and its own tokens as keys and its own tokens as
        queries; and rows with the prefix as keys and parts of it as queries."""
        prefix, texts = batch.prefix, len(batch)
        # The number of each text's tokens after the prefix
        own = batch.lengths - prefix
        width, computed = int(own.max()), len(once.computed)
        _, _, columns = grown((computed, texts, max(width, MIN_QUERIES)))
        parts = -(-prefix // columns)
        _, n, longest = grown((computed, texts + parts, prefix + width))
        rows, seen = np.zeros((n, longest), dtype=np.int64), np.zeros((n, longest), dtype=np.int64)
        queries, starts = np.zeros((n, columns), dtype=np.int64), np.zeros(n, dtype=np.int64)
        rows[:, :prefix], seen[:, :prefix] = np.arange(prefix), 1
        # The computed tokens after the prefix, text after text
        rest = np.arange(prefix, computed)
        is_own = np.arange(width) < own[:, None]
        rows[:texts, prefix : prefix + width][is_own] = rest
        seen[:texts, prefix : prefix + width] = is_own
        queries[:texts, :width][is_own] = rest
        queries[texts:].reshape(-1)[:prefix] = np.arange(prefix)
        starts[:texts], starts[texts : texts + parts] = prefix, columns * np.arange(parts)
        # The places of the prefix's tokens among the queries, then those of the texts' own tokens
        own_places = np.flatnonzero(np.arange(columns) < own[:, None])
        places = np.concatenate([texts * columns + np.arange(prefix), own_places])
        return cls(places, rows, seen, queries, starts)


def _rectangle(
    batch: PackedBatch, n: int, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """A rectangle of n rows and `longest` columns: each token's place int64[t], the token at each
    place int64[n * longest], and the mask of keys int64[n, longest]. Rows beyond the batch repeat
    its first token, and nothing reads them."""
    tokens = len(batch.input_ids)
    # A single text has a short pass, where each call counts
    if n == 1 and longest == tokens and batch.unseen is None:
        places = np.arange(tokens)
        return places, places, np.ones((1, tokens), dtype=np.int64)
    mask = np.zeros((n, longest), dtype=bool)
    mask[: len(batch)] = np.arange(longest) < batch.lengths[:, None]
    places = np.flatnonzero(mask)
    # Padding repeats the text's own first token: another text's states may be NaN, and a weight of
    # 0 does not hide NaN.
    first = np.zeros(n, dtype=np.int64)
    first[: len(batch)] = batch.cu_seqlens[:-1]
    rows = np.repeat(first, longest)
    rows[places] = np.arange(tokens)
    seen = mask.astype(np.int64)
    seen[: len(batch)] = seen_mask(mask[: len(batch)], batch)
    # A row without any key would give NaN
    seen[len(batch) :, 0] = 1
    return places, rows, seen


def in_rectangle(
    batch: PackedBatch, inputs: frozenset[str], padding_id: int, run: Callable[[Feed], Floats]
) -> Floats:
    """Run a graph that takes a padded batch: hidden states float32[t, h] of a packed one. `inputs`:
    the graph's names."""
    input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, padding_id)
    feed: Feed = {"input_ids": input_ids, "attention_mask": seen_mask(mask, batch).astype(np.int64)}
    if "token_type_ids" in inputs:
        types = np.zeros_like(input_ids)
        if batch.token_type_ids is not None:
            types, _ = pad(batch.token_type_ids, batch.cu_seqlens, 0)
        feed["token_type_ids"] = types
    return np.asarray(run(feed)[mask])


class MlmProduct(Protocol):
    """SPLADE's masked-language-model head, whose product may run elsewhere."""

    layers: MlmLayers

    def product(self, *, use_all_cores: bool) -> Product:
        """A function that multiplies float32[t, h] by the table of words."""


class HostHeads:
    """The heads of `spec`. `words`: the table of word embeddings, if the lexical head reads it.
    `mlm`: SPLADE's."""

    def __init__(
        self, spec: ModelSpec, words: Floats | None = None, mlm: MlmProduct | None = None
    ) -> None:
        self.spec = spec
        self._words = words
        self._mlm = mlm
        self._layers = HeadLayers.read(spec, None if mlm is None else mlm.layers)

    def outputs(
        self, batch: PackedBatch, hidden: Floats, *, use_all_cores: bool = False
    ) -> HeadOutputs:
        """Compute the batch's requested heads from hidden states float32[t, h]."""
        vector_rows, vectors = kept_rows(batch, self.spec)
        words = (
            self._words[batch.input_ids]
            if self._words is not None and wants_words(batch, self.spec)
            else None
        )
        product = None if self._mlm is None else self._mlm.product(use_all_cores=use_all_cores)
        states = States(
            hidden, Segments(batch.cu_seqlens, batch.cu_seqlens), words, vector_rows, product
        )
        columns = compute(NUMPY, states, batch.heads, self.spec, self._layers)
        rows = columns.pop(ENTRIES, None)
        entries = None if rows is None else SparseVectors.from_dense(rows)
        return outputs_of(columns, batch, vectors, entries)
