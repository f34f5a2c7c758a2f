"""Around a graph that computes the trunk only: its inputs for a batch, and all heads on its hidden states, in numpy.

A graph takes texts end to end, or padded to a rectangle, as its inputs say. Sizes may be rounded up for a runtime that compiles
kernels for a shape; what fills them is computed and not read. The heads are the formulas of `heads`, without torch: rows are
flat, `hidden[t, h]` with `cu_seqlens[n+1]`, and no sequence is empty. Tests hold each function against its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybridtei.backends.graph.activations import ACTIVATIONS
from hybridtei.batch import Head, Ids, Offsets, Once, PackedBatch, Padding, Ragged, computed_once, kept_tokens, pad, seen_mask
from hybridtei.checkpoint.classifiers import ScorePooling
from hybridtei.checkpoint.layers import (
    ClassifierLayer,
    CodeLayers,
    LinearLayer,
    NormLayer,
    classifier_layers,
    code_layers,
    dense_layer,
    lexical_layers,
    multivector_layer,
    step_layer,
)
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.outputs import Floats, HeadOutputs, SparseVectors

if TYPE_CHECKING:
    from hybridtei.backends.graph.mlm_head import MlmHead

Feed = dict[str, NDArray[np.int64]]
Sizes = tuple[int, int, int]  # tokens of a batch; rows and columns of the rectangle that attention has
ROWS = "rows"  # an input that only graphs of texts end to end have
QUERIES = "queries"  # of those, one of graphs where no token sees a later one
MIN_QUERIES = 32  # of a row that shares a prefix: the keys of each are a copy


def padding_of(inputs: frozenset[str]) -> Padding:
    """What a graph of these inputs pads."""
    return Padding.ATTENTION if ROWS in inputs else Padding.ALL


def end_to_end(
    batch: PackedBatch,
    inputs: frozenset[str],
    run: Callable[[Feed], Floats],
    grown: Callable[[Sizes], Sizes] = lambda sizes: sizes,
) -> Floats:
    """Hidden states float32[t, h] of a batch from a graph that takes its texts end to end.

    `inputs`: the names it takes. `grown`: sizes for which it is to be given more than there is. Attention has a row for each
    text, to which tokens that are computed once are copied.
    """
    once = computed_once(batch)
    shape = _Attended.of(batch, grown) if once is None else _Attended.shared(batch, once, grown)
    computed = len(shape.places)
    all_tokens, *_ = grown((computed, *shape.seen.shape))
    feed = {"input_ids": batch.input_ids}
    if "position_ids" in inputs:
        feed["position_ids"] = batch.position_ids
    for name, ids in (("token_type_ids", batch.token_type_ids), ("adapter_ids", batch.adapter_ids)):
        if name in inputs:
            feed[name] = np.zeros(len(batch.input_ids), dtype=np.int64) if ids is None else ids
    if once is not None:
        feed = {name: values[once.kept] for name, values in feed.items()}
    feed["places"] = shape.places
    if all_tokens > computed:
        more = all_tokens - computed
        feed = {name: np.concatenate([values, np.repeat(values[:1], more)]) for name, values in feed.items()}
    feed |= {ROWS: shape.rows.reshape(-1), "seen": shape.seen}
    if QUERIES in inputs:
        feed |= {QUERIES: shape.queries, "starts": shape.starts}
    hidden = run(feed)[:computed]
    return hidden if once is None else hidden[once.rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Attended:
    """The rectangles of attention: see `ops`. `rows` and `queries` are those of tokens that are computed."""

    places: Ids
    rows: Ids
    seen: Ids
    queries: Ids
    starts: Ids

    @classmethod
    def of(cls, batch: PackedBatch, grown: Callable[[Sizes], Sizes]) -> _Attended:
        """A row for each text, and its queries as its keys."""
        _, n, longest = grown((len(batch.input_ids), len(batch), batch.max_seqlen))
        places, rows, seen = _rectangle(batch, n, longest)
        rows = rows.reshape(n, longest)
        return cls(places, rows, seen, rows, np.zeros(n, dtype=np.int64))

    @classmethod
    def shared(cls, batch: PackedBatch, once: Once, grown: Callable[[Sizes], Sizes]) -> _Attended:
        """A row for each text, whose keys are the prefix and its own tokens and whose queries are its own; and rows that have
        the prefix as keys and a part of it as queries."""
        prefix, texts, own = batch.prefix, len(batch), batch.lengths - batch.prefix
        width, computed = int(own.max()), len(once.kept)
        _, _, columns = grown((computed, texts, max(width, MIN_QUERIES)))
        parts = -(-prefix // columns)
        _, n, longest = grown((computed, texts + parts, prefix + width))
        rows, seen = np.zeros((n, longest), dtype=np.int64), np.zeros((n, longest), dtype=np.int64)
        queries, starts = np.zeros((n, columns), dtype=np.int64), np.zeros(n, dtype=np.int64)
        rows[:, :prefix], seen[:, :prefix] = np.arange(prefix), 1
        rest = np.arange(prefix, computed)  # the texts' own tokens, text after text
        is_own = np.arange(width) < own[:, None]
        rows[:texts, prefix : prefix + width][is_own] = rest
        seen[:texts, prefix : prefix + width] = is_own
        queries[:texts, :width][is_own] = rest
        queries[texts:].reshape(-1)[:prefix] = np.arange(prefix)
        starts[:texts], starts[texts : texts + parts] = prefix, columns * np.arange(parts)
        own_places = np.flatnonzero(np.arange(columns) < own[:, None])
        return cls(np.concatenate([texts * columns + np.arange(prefix), own_places]), rows, seen, queries, starts)


def _rectangle(batch: PackedBatch, n: int, longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of n rows and `longest` columns: the place of each token int64[t], the token at each place int64[n * longest], and which
    are seen int64[n, longest]."""
    tokens = len(batch.input_ids)
    if n == 1 and longest == tokens and batch.unseen is None:  # a text alone, whose pass is short
        places = np.arange(tokens)
        return places, places, np.ones((1, tokens), dtype=np.int64)
    mask = np.zeros((n, longest), dtype=bool)
    mask[: len(batch)] = np.arange(longest) < batch.lengths[:, None]
    places = np.flatnonzero(mask)
    rows = np.zeros(mask.size, dtype=np.int64)
    rows[places] = np.arange(tokens)
    seen = mask.astype(np.int64)
    seen[: len(batch)] = seen_mask(mask[: len(batch)], batch)
    seen[len(batch) :, 0] = 1  # a row that may attend to nothing is not a number
    return places, rows, seen


def in_rectangle(batch: PackedBatch, inputs: frozenset[str], padding_id: int, run: Callable[[Feed], Floats]) -> Floats:
    """Hidden states float32[t, h] of a packed batch from a graph that takes a padded one. `inputs`: the names it takes."""
    input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, padding_id)
    feed: Feed = {"input_ids": input_ids, "attention_mask": seen_mask(mask, batch).astype(np.int64)}
    if "token_type_ids" in inputs:
        types = batch.token_type_ids
        feed["token_type_ids"] = np.zeros_like(input_ids) if types is None else pad(types, batch.cu_seqlens, 0)[0]
    return np.asarray(run(feed)[mask])


Pool = Callable[[Floats, Offsets], Floats]


def summed(hidden: Floats, cu_seqlens: Offsets) -> Floats:
    """Each sequence added up by itself: float32[n, h]. One by one, in half to a seventh of the time that `reduceat` takes."""
    sums = np.empty((len(cu_seqlens) - 1, hidden.shape[1]), dtype=hidden.dtype)
    for row, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        np.add.reduce(hidden[begin:end], axis=0, out=sums[row])
    return sums


def counts(cu_seqlens: Offsets) -> Floats:
    """Tokens a sequence: float32[n, 1]."""
    return np.diff(cu_seqlens).astype(np.float32)[:, None]


def weighted_mean(hidden: Floats, cu_seqlens: Offsets) -> Floats:
    """Mean with weights 1, 2, 3 … from the first token on."""
    lengths = np.diff(cu_seqlens)
    places = np.arange(len(hidden)) - np.repeat(cu_seqlens[:-1], lengths) + 1
    weights = places.astype(np.float32)[:, None]
    return np.asarray(summed(hidden * weights, cu_seqlens) / summed(weights, cu_seqlens), dtype=np.float32)


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda hidden, cu_seqlens: hidden[cu_seqlens[:-1]],
    "lasttoken": lambda hidden, cu_seqlens: hidden[cu_seqlens[1:] - 1],
    "max": lambda hidden, cu_seqlens: np.maximum.reduceat(hidden, cu_seqlens[:-1], axis=0),
    "mean": lambda hidden, cu_seqlens: np.asarray(summed(hidden, cu_seqlens) / counts(cu_seqlens)),
    "mean_sqrt_len_tokens": lambda hidden, cu_seqlens: np.asarray(summed(hidden, cu_seqlens) / np.sqrt(counts(cu_seqlens))),
    "weightedmean": weighted_mean,
}


def through(x: Floats, layer: LinearLayer) -> Floats:
    """`activation(weight x + bias)`: float32[t, in] -> float32[t, out]."""
    y = x @ layer.weight.T
    return ACTIVATIONS[layer.activation](y if layer.bias is None else y + layer.bias)


def dense(hidden: Floats, cu_seqlens: Offsets, pooling: Sequence[str], layers: Sequence[ClassifierLayer] = ()) -> Floats:
    """Pooled vectors, several poolings side by side, through the layers after them: float32[n, d]."""
    pooled = [POOLINGS[mode](hidden, cu_seqlens) for mode in pooling]
    return tag(pooled[0] if len(pooled) == 1 else np.concatenate(pooled, axis=1), layers)


def code(pooled: Floats, layers: CodeLayers) -> SparseVectors:
    """The largest latents of pooled vectors float32[n, d], as far as they are above 0. Source: SparseAutoEncoder of
    sentence-transformers, after Wen et al. 2025, "Beyond Matryoshka"; it divides by the deviation of a sample, plus epsilon."""
    if layers.eps is not None:
        centred = pooled - pooled.mean(1, keepdims=True)
        pooled = centred / (centred.std(1, ddof=1, keepdims=True) + np.float32(layers.eps))
    latents = pooled @ layers.latents.T + layers.bias
    largest = np.argpartition(latents, -layers.active, axis=1)[:, -layers.active :]
    kept = np.zeros_like(latents)
    np.put_along_axis(kept, largest, np.maximum(np.take_along_axis(latents, largest, 1), np.float32(0)), 1)
    return SparseVectors.from_dense(kept)


def rounded(vectors: Floats) -> Floats:
    """Whole numbers from -127 to 127, `round(127 tanh(x))`, of two equally near the even. Source: pplx-embed's quantizer."""
    return np.round(np.float32(127) * np.tanh(vectors))


def layer_norm(x: Floats, eps: float = 1e-5) -> Floats:
    """Each row with mean 0 and variance 1, without parameters."""
    centred = x - x.mean(1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(1, keepdims=True) + np.float32(eps)))


def classify(hidden: Floats, cu_seqlens: Offsets, pooling: ScorePooling, layers: Sequence[ClassifierLayer]) -> Floats:
    """Logits of each sequence: float32[n, l]."""
    if pooling == "late":
        return POOLINGS["mean"](tag(hidden, layers), cu_seqlens)
    return tag(POOLINGS[pooling](hidden, cu_seqlens), layers)


def tag(rows: Floats, layers: Sequence[ClassifierLayer]) -> Floats:
    """Logits of each row: float32[t, l]."""
    for layer in layers:
        rows = normed(rows, layer) if isinstance(layer, NormLayer) else through(rows, layer)
    return rows


def normed(x: Floats, layer: NormLayer) -> Floats:
    """LayerNorm with its parameters."""
    y = layer_norm(x, layer.eps) * layer.weight
    return y if layer.bias is None else y + layer.bias


def lexical(inputs: Floats, layers: Sequence[LinearLayer]) -> NDArray[np.float32]:
    """Weight of each token: float32[t, k] -> float32[t], >= 0."""
    for layer in layers:
        inputs = through(inputs, layer)
    return np.maximum(inputs[:, 0], np.float32(0))


class HostHeads:
    """The heads that `spec` has. `words`: the table of word embeddings, where the lexical head reads it. `mlm`: for SPLADE."""

    def __init__(self, spec: ModelSpec, words: Floats | None = None, mlm: MlmHead | None = None) -> None:
        self.spec = spec
        self._words = words
        self._mlm = mlm
        self._dense_layers = [step_layer(module) for module in spec.dense_modules]
        is_code = spec.sparse is not None and spec.sparse.kind == "code"
        self._code = code_layers(spec.sparse, spec.dense_width) if spec.sparse is not None and is_code else None
        is_lexical = spec.sparse is not None and not (is_code or spec.is_splade)
        self._lexical = lexical_layers(spec.sparse, spec.hidden_size) if spec.sparse is not None and is_lexical else ()
        self._projection = None if spec.multivector is None else multivector_layer(spec.multivector, spec.hidden_size)
        self._before = [] if spec.multivector is None else [dense_layer(module) for module in spec.multivector.before]
        head = spec.classifier
        self._classifier = () if head is None else classifier_layers(head, spec.folder, spec.hidden_size)
        self._special_ids = np.array(sorted(spec.removed_ids), dtype=np.int64)

    def outputs(self, batch: PackedBatch, hidden: Floats, *, use_all_cores: bool = False) -> HeadOutputs:
        """Compute the heads that the batch's requests ask for from hidden states float32[t, h]."""
        vectors, weights = None, None
        if Head.SPARSE in batch.heads and self._mlm is not None:
            vectors = self._mlm.splade(hidden, batch.cu_seqlens, use_all_cores=use_all_cores)
        elif Head.SPARSE in batch.heads and self._code is not None:
            vectors = code(dense(hidden, batch.cu_seqlens, self.spec.pooling, self._dense_layers), self._code)
        elif Head.SPARSE in batch.heads:
            weights = self._token_weights(batch, hidden)
        return HeadOutputs(
            dense=self._dense(batch, hidden) if Head.DENSE in batch.heads else None,
            token_weights=weights,
            splade=vectors,
            multivector=self._multivector(batch, hidden) if Head.MULTIVECTOR in batch.heads else None,
            tokens=Ragged(hidden, batch.cu_seqlens) if Head.TOKENS in batch.heads else None,
            scores=self._scores(batch, hidden) if Head.SCORES in batch.heads else None,
            tags=self._tags(batch, hidden) if Head.TAGS in batch.heads else None,
        )

    def _scores(self, batch: PackedBatch, hidden: Floats) -> Floats:
        assert self.spec.classifier is not None
        return classify(hidden, batch.cu_seqlens, self.spec.classifier.pooling, self._classifier)

    def _tags(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        return Ragged(tag(hidden, self._classifier), batch.cu_seqlens)

    def _dense(self, batch: PackedBatch, hidden: Floats) -> Floats:
        vectors = dense(hidden, batch.cu_seqlens, self.spec.pooling, self._dense_layers)
        return rounded(vectors) if self.spec.is_rounded else vectors

    def _token_weights(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        assert self.spec.sparse is not None
        sources = {"hidden": hidden}
        if self._words is not None:
            sources["embedding"] = layer_norm(self._words[batch.input_ids])
        inputs = np.concatenate([sources[name] for name in self.spec.sparse.inputs], axis=1)
        return Ragged(lexical(inputs, self._lexical), batch.cu_seqlens)

    def _multivector(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        assert self.spec.multivector is not None
        assert self._projection is not None
        kept, offsets = kept_tokens(self.spec.multivector.drop, batch.input_ids, batch.cu_seqlens, self._special_ids)
        return Ragged(through(tag(hidden[kept], self._before), self._projection), offsets)
