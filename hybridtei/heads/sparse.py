"""Lexical weights: how much each token of a text matters, from its last hidden state.

Two forms. BGE-M3's is one linear layer, relu(W h + b). Ours is a small perceptron that also sees the layer-normed word
embedding: which word it is, not only what it means here. Merging a token's repeats is left to `postprocess.sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, relu


@dataclass(frozen=True, slots=True)
class LexicalWeights:
    """out.weight [1, k], out.bias [1]; for the perceptron also hidden.weight [k, inputs], hidden.bias [k]."""

    out_weight: Tensor
    out_bias: Tensor
    hidden_weight: Tensor | None = None
    hidden_bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] | None = None


def lexical_inputs(hidden: Tensor, word_embeddings: Tensor | None, names: Sequence[str]) -> Tensor:
    """Join what the head sees: float[t, h] each -> float[t, h * len(names)]."""
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
