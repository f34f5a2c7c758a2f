"""Lexical weights: a weight >= 0 for each token of a text, from its last hidden state.

BGE-M3's head is one linear layer, relu(W h + b). Ours is a perceptron whose input also has the layer-normed word embedding.
`tasks` merges the repeats of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, relu

from hybridtei.backends.torch.layout import PackedLayout


@dataclass(frozen=True, slots=True)
class LexicalWeights:
    """out.weight [1, k], out.bias [1]; for the perceptron also hidden.weight [k, inputs], hidden.bias [k]."""

    out_weight: Tensor
    out_bias: Tensor
    hidden_weight: Tensor | None = None
    hidden_bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] | None = None


def lexical_inputs(hidden: Tensor, word_embeddings: Tensor | None, names: Sequence[str]) -> Tensor:
    """Concatenate the head's inputs: float[t, h] each -> float[t, h * len(names)]."""
    sources = {"hidden": lambda: hidden, "embedding": lambda: _normed(word_embeddings)}
    return torch.cat([sources[name]() for name in names], dim=1)


def _normed(word_embeddings: Tensor | None) -> Tensor:
    assert word_embeddings is not None
    return layer_norm(word_embeddings, word_embeddings.shape[-1:])


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
