"""The heads of a model, written once for numpy and torch: hidden states -> arrays by name.

Pooling, then linear layers and norms: dense vectors (not cut, not normalised), multi-vectors,
logits of texts or of tokens. Lexical weights are one linear layer, relu(W h + b), in BGE-M3's head;
our head is a perceptron that also reads the layer-normed word embedding. `tasks` merges the repeats
of a token.

Rows are flat, `hidden[t, h]`, one a token. Pooled vectors are always float32; a layer computes in
its own precision. No function here waits for a device, so torch can launch the next pass after this
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridtei.batch import Head, Offsets, PackedBatch, Ragged, kept_tokens
from hybridtei.models.checkpoint.classifiers import (
    Array,
    CodeLayers,
    Layer,
    LinearLayer,
    NormLayer,
)
from hybridtei.models.families.family import ScorePooling
from hybridtei.outputs import HeadOutputs, SparseVectors

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec


class Segments(NamedTuple):
    """The offsets int64[n+1] of sequences in flat rows, on the host and as the library's array. No
    sequence is empty."""

    cu_seqlens: Offsets
    offsets: Array


@dataclass(frozen=True, slots=True)
class Functions:
    """Functions that differ between numpy and torch. `library`: the module, for functions with the
    same name in both.

    `segment_sum`, `segment_max`: [t, w] -> [n, w], each sequence alone, so that neighbours cannot
    change a digit.
    `layer_norm`: of each row, with weight, bias and epsilon. `largest`: keep the k largest positive
    entries of each row, and set the others to 0. `repeated`: repeat each number for the tokens of
    its sequence. `rows`: the rows at these places. `slice_tokens`: tokens whose logits over a
    vocabulary are computed together; of 256 they take 31 MB in float32 at v = 30k.
    """

    library: Any
    float32: Callable[[Array], Array]
    activations: Mapping[str, Callable[[Array], Array]]
    linear: Callable[[Array, Array, Array | None], Array]
    layer_norm: Callable[[Array, Array | None, Array | None, float], Array]
    segment_sum: Callable[[Array, Segments], Array]
    segment_max: Callable[[Array, Segments], Array]
    largest: Callable[[Array, int], Array]
    repeated: Callable[[Array, Segments], Array]
    rows: Callable[[Array, Array], Array]
    slice_tokens: Callable[[Array], int]


Pool = Callable[[Functions, Array, Segments], Array]


def counts(f: Functions, at: Segments) -> Array:
    """The number of tokens of each sequence: float32[n, 1]."""
    return f.float32(at.offsets[1:] - at.offsets[:-1])[:, None]


def weighted_mean(f: Functions, hidden: Array, at: Segments) -> Array:
    """The mean with weights 1, 2, 3 … from the first token on: [t, h] -> float32[n, h]. Source:
    SGPT, 2022."""
    tokens = f.library.arange(1, len(hidden) + 1, device=at.offsets.device)
    weights = f.float32(tokens - f.repeated(at.offsets[:-1], at))[:, None]
    return f.segment_sum(f.float32(hidden) * weights, at) / f.segment_sum(weights, at)


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda f, hidden, at: f.rows(hidden, at.offsets[:-1]),
    "max": lambda f, hidden, at: f.segment_max(hidden, at),
    "mean": lambda f, hidden, at: f.segment_sum(hidden, at) / counts(f, at),
    "mean_sqrt_len_tokens": lambda f, hidden, at: f.segment_sum(hidden, at) / counts(f, at) ** 0.5,
    "weightedmean": weighted_mean,
    "lasttoken": lambda f, hidden, at: f.rows(hidden, at.offsets[1:] - 1),
}


def pooled(f: Functions, hidden: Array, at: Segments, pooling: Sequence[str]) -> Array:
    """The concatenation of these poolings: [t, h] -> float32[n, d]. Source: sentence-transformers'
    Pooling."""
    return f.float32(_beside(f, [POOLINGS[mode](f, hidden, at) for mode in pooling]))


def _beside(f: Functions, parts: Sequence[Array], axis: int = 1) -> Array:
    """[t, a], [t, b] … -> [t, a + b …], without a copy of a single part."""
    if len(parts) == 1:
        return parts[0]
    return f.library.concatenate(parts, axis)


def through(f: Functions, rows: Array, layers: Iterable[Layer]) -> Array:
    """Apply layers to rows, one after the other: [t, in] -> [t, out]."""
    for layer in layers:
        if isinstance(layer, NormLayer):
            rows = f.layer_norm(rows, layer.weight, layer.bias, layer.eps)
        else:
            rows = f.activations[layer.activation](f.linear(rows, layer.weight, layer.bias))
    return rows


def dense(
    f: Functions, hidden: Array, at: Segments, pooling: Sequence[str], layers: Sequence[Layer] = ()
) -> Array:
    """Pool, and apply the later layers: [t, h] -> float32[n, d]."""
    return through(f, pooled(f, hidden, at, pooling), layers)


def classify(
    f: Functions, hidden: Array, at: Segments, pooling: ScorePooling, layers: Sequence[Layer]
) -> Array:
    """Logits of each sequence: [t, h] -> float32[n, l]."""
    if pooling == "late":
        return POOLINGS["mean"](f, through(f, hidden, layers), at)
    return dense(f, hidden, at, (pooling,), layers)


def code(f: Functions, vectors: Array, layers: CodeLayers) -> Array:
    """The largest latents of pooled vectors, the others 0: float32[n, d] -> float32[n, width].
    Source: SparseAutoEncoder of sentence-transformers, after Wen et al. 2025, "Beyond Matryoshka".
    It divides by the sample deviation plus epsilon."""
    if layers.eps is not None:
        centred = vectors - vectors.mean(1, keepdims=True)
        deviation = ((centred**2).sum(1, keepdims=True) / (vectors.shape[1] - 1)) ** 0.5
        vectors = centred / (deviation + layers.eps)
    return f.largest(f.linear(vectors, layers.latents, layers.bias), layers.active)


def token_codes(f: Functions, hidden: Array, at: Segments, layers: CodeLayers) -> Array:
    """The largest latents of each token's unit state, then the maximum over tokens, special ones
    included: [t, h] -> float32[n, width], all >= 0. Source: SlideOn, 2026."""
    states = f.float32(hidden)
    unit = states / ((states**2).sum(1, keepdims=True) + SMALLEST_SQUARE) ** 0.5
    return column_maxima(
        f,
        unit,
        at,
        lambda rows: f.largest(f.linear(rows, layers.latents, layers.bias), layers.active),
    )


def rounded(f: Functions, vectors: Array) -> Array:
    """Whole numbers from -127 to 127: `round(127 tanh(x))`, halves to even. Source: pplx-embed's
    quantizer."""
    return f.library.round(127 * f.library.tanh(vectors))


def lexical(
    f: Functions, hidden: Array, words: Array | None, inputs: Sequence[str], layers: Sequence[Layer]
) -> Array:
    """The weight of each token: [t, h] -> [t], >= 0. `words` [t, h]: word embeddings, layer-normed
    here. `inputs`: the parts that the first layer reads. Source: BGE-M3, Chen et al. 2024, section
    3.2."""
    sources = {"hidden": hidden}
    if words is not None:
        sources["embedding"] = f.layer_norm(words, None, None, 1e-5)
    rows = through(f, _beside(f, [sources[name] for name in inputs]), layers)
    return f.activations["relu"](rows[:, 0])


# A state of zeros stays zero
SMALLEST_SQUARE = 1e-24
Product = Callable[[Array], Array]


@dataclass(frozen=True, slots=True, eq=False)
class MlmLayers:
    """The masked-language-model head: a dense layer, a norm, the product with `table` [v, h], and
    `bias` [v]."""

    steps: tuple[LinearLayer, NormLayer]
    table: Array
    bias: Array | None


def splade(f: Functions, hidden: Array, at: Segments, layers: MlmLayers, product: Product) -> Array:
    """max over all tokens, special ones included, of log(1 + relu(logit)): [t, h] -> float32[n, v],
    all >= 0.

    `product`: [t, h] -> [t, v], with the table. The maximum comes first, over slices of rows, since
    log1p, relu and the bias, the same for all tokens, keep the order: logits of a 16k-token batch
    at v=30k take 2 GB. Source: SPLADE v2, Formal et al. 2021 (max pooling).
    """
    best = f.float32(column_maxima(f, through(f, hidden, layers.steps), at, product))
    if layers.bias is not None:
        best = best + f.float32(layers.bias)
    return f.library.log1p(f.activations["relu"](best))


def column_maxima(f: Functions, rows: Array, at: Segments, product: Product) -> Array:
    """The largest product in each column over a sequence's tokens: [t, h] -> [n, v]."""
    maxima = list[Array]()
    step = f.slice_tokens(rows)
    for start in range(0, len(rows), step):
        logits = product(rows[start : start + step])
        # The sequences with rows here; the first may have begun in the slice before
        first = np.searchsorted(at.cu_seqlens, start, "right") - 1
        end = np.searchsorted(at.cu_seqlens, start + len(logits))
        host, device = ((offsets[first : end + 1] - start).clip(0, len(logits)) for offsets in at)
        best = f.segment_max(logits, Segments(host, device))
        if at.cu_seqlens[first] < start:
            before = maxima.pop()
            maxima.append(before[:-1])
            maxima.append(f.library.maximum(before[-1:], best[:1]))
            best = best[1:]
        if len(best):
            maxima.append(best)
    return _beside(f, maxima, 0)


@dataclass(frozen=True, slots=True, eq=False)
class HeadLayers:
    """The layers of a model's heads, as arrays of one library. `multivector`: the last layer is the
    projection. `scored`: what `classifier` reads."""

    dense: Sequence[Layer] = ()
    code: CodeLayers | None = None
    lexical: Sequence[Layer] = ()
    multivector: Sequence[Layer] = ()
    classifier: Sequence[Layer] = ()
    scored: ScorePooling = "none"
    mlm: MlmLayers | None = None

    @classmethod
    def read(cls, spec: ModelSpec, mlm: MlmLayers | None = None) -> HeadLayers:
        """Read a checkpoint's layers, in numpy. Raises LoadError."""
        # It needs msgspec, which measurements on a GPU run without
        from hybridtei.models.checkpoint import layers
        from hybridtei.models.checkpoint.kinds import Labels

        read: dict[str, Any] = {"dense": [layers.step_layer(step) for step in spec.kind.steps]}
        if spec.sparse is not None and spec.sparse.kind == "code":
            # Without a pooling, token states are read
            width = spec.dense_width or spec.hidden_size
            read["code"] = layers.code_layers(spec.sparse, width)
        elif spec.sparse is not None and not spec.is_splade:
            read["lexical"] = layers.lexical_layers(spec.sparse, spec.hidden_size)
        if spec.multivector is not None:
            read["multivector"] = [
                *map(layers.dense_layer, spec.multivector.before),
                layers.multivector_layer(spec.multivector, spec.hidden_size),
            ]
        if isinstance(spec.kind, Labels):
            head = spec.kind.head
            read["classifier"] = layers.classifier_layers(head, spec.folder, spec.hidden_size)
            read["scored"] = head.pooling
        return cls(mlm=mlm, **read)


# Name of the computed rows [n, v] whose non-zero entries are the output
ENTRIES = "entries"


class States(NamedTuple):
    """The inputs of heads: states [t, h], the sequences' offsets, word embeddings [t, h], the rows
    int64[t'] that get vectors, and the product with the word table."""

    hidden: Array
    at: Segments
    words: Array | None = None
    vector_rows: Array | None = None
    product: Product | None = None


def kept_rows(batch: PackedBatch, spec: ModelSpec) -> tuple[Offsets | None, Offsets | None]:
    """The rows int64[t'] of tokens that get a vector, and their offsets int64[n+1]; None without a
    request for them."""
    if Head.MULTIVECTOR not in batch.heads or spec.multivector is None:
        return None, None
    drop = spec.multivector.drop
    special = np.array(sorted(spec.removed_ids) if drop == "specials" else (), dtype=np.int64)
    mask, offsets = kept_tokens(drop, batch.input_ids, batch.cu_seqlens, special)
    return np.flatnonzero(mask), offsets


def wants_words(batch: PackedBatch, spec: ModelSpec) -> bool:
    """True if a requested head also reads word embeddings."""
    return Head.SPARSE in batch.heads and spec.reads_words


def compute(
    f: Functions, states: States, heads: frozenset[Head], spec: ModelSpec, layers: HeadLayers
) -> dict[str, Array]:
    """Compute the requested heads, by the names of `HeadOutputs`' columns; sparse vectors of whole
    texts as ENTRIES."""
    hidden, at, columns = states.hidden, states.at, dict[str, Array]()
    if Head.DENSE in heads:
        vectors = dense(f, hidden, at, spec.pooling, layers.dense)
        columns["dense"] = rounded(f, vectors) if spec.kind.is_rounded else vectors
    if Head.SPARSE in heads:
        if layers.mlm is not None:
            assert states.product is not None
            columns[ENTRIES] = splade(f, hidden, at, layers.mlm, states.product)
        elif layers.code is not None and not spec.pooling:
            columns[ENTRIES] = token_codes(f, hidden, at, layers.code)
        elif layers.code is not None:
            columns[ENTRIES] = code(
                f, dense(f, hidden, at, spec.pooling, layers.dense), layers.code
            )
        else:
            assert spec.sparse is not None
            columns["token_weights"] = lexical(
                f, hidden, states.words, spec.sparse.inputs, layers.lexical
            )
    if Head.MULTIVECTOR in heads:
        columns["multivector"] = through(f, f.rows(hidden, states.vector_rows), layers.multivector)
    if Head.TOKENS in heads:
        columns["tokens"] = hidden
    if Head.SCORES in heads:
        columns["scores"] = classify(f, hidden, at, layers.scored, layers.classifier)
    if Head.TAGS in heads:
        columns["tags"] = through(f, hidden, layers.classifier)
    return columns


def outputs_of(
    arrays: Mapping[str, Any],
    batch: PackedBatch,
    vectors: Offsets | None,
    entries: SparseVectors | None,
) -> HeadOutputs:
    """Make the columns from arrays on the host. `vectors`: offsets of the multi-vectors."""
    columns: dict[str, Any] = {**arrays, "splade": entries}
    for name in ("token_weights", "tokens", "tags"):
        if name in columns:
            columns[name] = Ragged(columns[name], batch.cu_seqlens)
    if vectors is not None:
        columns["multivector"] = Ragged(columns["multivector"], vectors)
    return HeadOutputs(**columns)
