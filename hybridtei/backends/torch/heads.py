"""The heads of a model on its device: their formulas, hidden states in, tensors out, by name; and these, on the host, as
`HeadOutputs`.

Pooling, then linear layers: dense vectors (not cut, not normalised), multi-vectors, and logits of texts or of tokens; layers of
a classifier's head run in float32 whatever the trunk's dtype. Lexical weights are one linear layer, relu(W h + b), in BGE-M3's
head; ours is a perceptron whose input also has the layer-normed word embedding. `tasks` merges the repeats of a token.

Everything a request wants of a pass is computed before anything is copied. Loading is `load`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, relu

from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.memory import Arrays
from hybridtei.batch import Head, Offsets, PackedBatch, Ragged, kept_tokens, offsets_of
from hybridtei.checkpoint.classifiers import ScorePooling
from hybridtei.outputs import HeadOutputs, SparseVectors

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

Pool = Callable[[Tensor, PackedLayout], Tensor]


def mean_sqrt_len(hidden: Tensor, layout: PackedLayout) -> Tensor:
    """Sum over the square root of the length: float[t, h] -> float32[n, h]."""
    return layout.sum(hidden) / layout.counts.sqrt()


def weighted_mean(hidden: Tensor, layout: PackedLayout) -> Tensor:
    """Mean with weights 1, 2, 3 … from the first token on: float[t, h] -> float32[n, h]. Source: SGPT, 2022."""
    weights = (layout.places() + 1).to(torch.float32).unsqueeze(1)
    return layout.sum(hidden.float() * weights) / layout.sum(weights)


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda hidden, layout: layout.first(hidden).float(),
    "max": lambda hidden, layout: layout.max(hidden).float(),
    "mean": lambda hidden, layout: layout.mean(hidden),
    "mean_sqrt_len_tokens": mean_sqrt_len,
    "weightedmean": weighted_mean,
    "lasttoken": lambda hidden, layout: layout.last(hidden).float(),
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """`activation(weight x + bias)`; weight float[out, in]."""

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]


def dense(hidden: Tensor, layout: PackedLayout, pooling: Sequence[str], layers: Sequence[Layer] = ()) -> Tensor:
    """Pooled vectors, several poolings side by side, through the layers after them: float[t, h] -> float32[n, d].

    Pooling sums and layers run in float32 whatever the trunk's dtype. Source: sentence-transformers Pooling and Dense.
    """
    return tag(torch.cat([POOLINGS[mode](hidden, layout) for mode in pooling], dim=1), layers)


@dataclass(frozen=True, slots=True)
class CodeWeights:
    """See `checkpoint.layers.CodeLayers`."""

    latents: Tensor
    bias: Tensor
    active: int
    eps: float | None


def code(pooled: Tensor, weights: CodeWeights) -> Tensor:
    """The largest latents of pooled vectors, others 0: float32[n, d] -> float32[n, width]. Source: SparseAutoEncoder of
    sentence-transformers, after Wen et al. 2025, "Beyond Matryoshka"."""
    if weights.eps is not None:
        centred = pooled - pooled.mean(1, keepdim=True)
        pooled = centred / (centred.std(1, keepdim=True) + weights.eps)
    latents = linear(pooled, weights.latents, weights.bias)
    values, places = torch.topk(latents, weights.active, dim=1)
    return torch.zeros_like(latents).scatter_(1, places, relu(values))


def rounded(vectors: Tensor) -> Tensor:
    """Whole numbers from -127 to 127, `round(127 tanh(x))`, of two equally near the even. Source: pplx-embed's quantizer."""
    return torch.round(127 * torch.tanh(vectors))


def multivector(hidden: Tensor, kept: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project the kept tokens: float[t, h], bool[t] -> float[t', d]. Source: BGE-M3, Chen et al. 2024, section 3.2."""
    return linear(hidden[kept], weight, bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm with its parameters."""

    weight: Tensor
    bias: Tensor | None
    eps: float


Layer = DenseLayer | Norm


def classify(hidden: Tensor, layout: PackedLayout, pooling: ScorePooling, layers: Sequence[Layer]) -> Tensor:
    """Logits of each sequence: float[t, h] -> float32[n, l]."""
    if pooling == "late":
        return layout.mean(tag(hidden, layers))
    return tag(POOLINGS[pooling](hidden, layout), layers)


def tag(rows: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Logits of each row: float[t, h] -> float32[t, l]."""
    rows = rows.float()
    for layer in layers:
        if isinstance(layer, Norm):
            rows = layer_norm(rows, rows.shape[-1:], layer.weight, layer.bias, layer.eps)
        else:
            rows = layer.activation(linear(rows, layer.weight, layer.bias))
    return rows


@dataclass(frozen=True, slots=True)
class LexicalWeights:
    """out.weight [1, k], out.bias [1]; for the perceptron also hidden.weight [k, inputs], hidden.bias [k]."""

    out_weight: Tensor
    out_bias: Tensor
    hidden_weight: Tensor | None = None
    hidden_bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] | None = None


def lexical_inputs(hidden: Tensor, word_embeddings: Tensor | None, names: Sequence[str]) -> Tensor:
    """Concatenate the head's inputs: float[t, h] each -> float[t, h * len(names)]. Embeddings are layer-normed."""
    sources = {"hidden": hidden}
    if word_embeddings is not None:
        sources["embedding"] = layer_norm(word_embeddings, word_embeddings.shape[-1:])
    return torch.cat([sources[name] for name in names], dim=1)


def lexical(inputs: Tensor, head: LexicalWeights) -> Tensor:
    """Weight of each token: float[t, k] -> float32[t], >= 0. Source: BGE-M3, Chen et al. 2024, section 3.2."""
    if head.hidden_weight is not None and head.activation is not None:
        inputs = head.activation(linear(inputs, head.hidden_weight, head.hidden_bias))
    return relu(linear(inputs, head.out_weight, head.out_bias)).squeeze(1).float()


SLICE_TOKENS = 2048  # logits of a slice at v = 30k: 250 MB in float32


def splade(hidden: Tensor, layout: PackedLayout, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """max over tokens of log(1 + relu(logit)): float[t, h] -> float32[n, v], all >= 0. Special tokens take part.

    Takes max before log1p(relu): both rise monotonically, so the answer is the same and that work is n*v, not t*v.
    Logits of a 16k-token batch at v=30k are 2 GB in float32, so whole sequences go through in slices.
    Source: SPLADE v2, Formal et al. 2021 (max pooling).
    """
    strongest = [
        part.amax(0)
        for start, stop, lengths in _slices(layout.lengths)
        for part in torch.split(logits_of(hidden[start:stop]), lengths)
    ]
    return torch.log1p(torch.relu(torch.stack(strongest).float()))


def _slices(lengths: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """(first row, last row + 1, lengths) of runs of whole sequences of at most SLICE_TOKENS, or of one longer sequence."""
    start, run = 0, list[int]()
    for length in lengths:
        if run and sum(run) + length > SLICE_TOKENS:
            yield start, start + sum(run), run
            start, run = start + sum(run), []
        run.append(length)
    if run:
        yield start, start + sum(run), run


LogitsOf = Callable[[Tensor], Tensor]  # hidden states float[t, h] -> logits float[t, v]
KEPT = "kept"  # among a batch's integers: rows of the tokens that have a vector
ENTRIES = "entries"  # among what is computed: rows of which `entries_of` travels


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """The layers of whatever heads a model has, on its device."""

    dense: Sequence[Layer] = ()
    code: CodeWeights | None = None
    lexical: LexicalWeights | None = None
    projection: tuple[Tensor, Tensor | None] | None = None
    before: Sequence[DenseLayer] = ()
    classifier: Sequence[Layer] = ()
    logits_of: LogitsOf | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a batch's heads need besides the batch: integers for the device, and offsets of the multi-vectors."""

    integers: Mapping[str, Offsets] = field(default_factory=dict)
    multivector: Offsets | None = None


def wanted(batch: PackedBatch, spec: ModelSpec) -> Wanted:
    """See `Wanted`."""
    if Head.MULTIVECTOR not in batch.heads or spec.multivector is None:
        return Wanted()
    special = np.array(sorted(spec.removed_ids), dtype=np.int64)
    kept, offsets = kept_tokens(spec.multivector.drop, batch.input_ids, batch.cu_seqlens, special)
    return Wanted({KEPT: np.flatnonzero(kept)}, offsets)


def wants_words(batch: PackedBatch, spec: ModelSpec) -> bool:
    """Whether a head that is wanted sees word embeddings, too."""
    return Head.SPARSE in batch.heads and spec.sparse is not None and "embedding" in spec.sparse.inputs


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """What heads see: hidden states float[t, h], where sequences lie, word embeddings float[t, h], rows that have vectors."""

    hidden: Tensor
    layout: PackedLayout
    embeddings: Tensor | None = None
    kept: Tensor | None = None


def compute(states: States, heads: frozenset[Head], spec: ModelSpec, weights: HeadWeights) -> dict[str, Tensor]:
    """Each head that is wanted, by the name of its column in `HeadOutputs`; SPLADE's vectors float32[n, v] as ENTRIES.

    Nothing here waits for the device, so that the next pass can be launched behind this one.
    """
    hidden, layout, found = states.hidden, states.layout, dict[str, Tensor]()
    if Head.DENSE in heads:
        vectors = dense(hidden, layout, spec.pooling, weights.dense)
        found["dense"] = rounded(vectors) if spec.is_rounded else vectors
    if Head.SPARSE in heads and spec.is_splade:
        assert weights.logits_of is not None
        found[ENTRIES] = splade(hidden, layout, weights.logits_of)
    elif Head.SPARSE in heads and weights.code is not None:
        found[ENTRIES] = code(dense(hidden, layout, spec.pooling, weights.dense), weights.code)
    elif Head.SPARSE in heads:
        assert spec.sparse is not None
        assert weights.lexical is not None
        found["token_weights"] = lexical(lexical_inputs(hidden, states.embeddings, spec.sparse.inputs), weights.lexical)
    if Head.MULTIVECTOR in heads:
        assert states.kept is not None
        assert weights.projection is not None
        rows = tag(hidden, weights.before).to(hidden.dtype) if weights.before else hidden
        found["multivector"] = multivector(rows, states.kept, *weights.projection)
    if Head.TOKENS in heads:
        found["tokens"] = hidden
    if Head.SCORES in heads:
        assert spec.classifier is not None
        found["scores"] = classify(hidden, layout, spec.classifier.pooling, weights.classifier)
    if Head.TAGS in heads:
        found["tags"] = tag(hidden, weights.classifier)
    return found


def outputs_of(arrays: Arrays, batch: PackedBatch, wanted: Wanted, vocab_size: int) -> HeadOutputs:
    """What came to the host, as columns."""
    of_tokens = {name: Ragged(arrays[name], batch.cu_seqlens) for name in ("token_weights", "tokens", "tags") if name in arrays}
    vectors = None
    if "multivector" in arrays:
        assert wanted.multivector is not None
        vectors = Ragged(arrays["multivector"], wanted.multivector)
    entries = None
    if "splade_values" in arrays:
        offsets = offsets_of(arrays["splade_lengths"])
        entries = SparseVectors(arrays["splade_indices"], arrays["splade_values"], offsets, vocab_size)
    return HeadOutputs(dense=arrays.get("dense"), splade=entries, multivector=vectors, scores=arrays.get("scores"), **of_tokens)


def entries_of(rows: Tensor) -> dict[str, Tensor]:
    """The entries of float[n, v] that are not zero: they are few, and all of it would be hundreds of megabytes to copy.

    Waits for the device, which alone knows how many they are.
    """
    row, column = rows.nonzero(as_tuple=True)
    return {
        "splade_indices": column,
        "splade_values": rows[row, column],
        "splade_lengths": rows.count_nonzero(dim=1),
    }
