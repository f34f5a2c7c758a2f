"""Pooling, then linear layers: dense vectors (not cut, not normalised), multi-vectors, and logits of texts or of tokens.

Layers of a classifier's head run in float32 whatever the trunk's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.checkpoint.classifiers import ScorePooling

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


def dense(hidden: Tensor, layout: PackedLayout, pooling: Sequence[str], layers: Sequence[DenseLayer] = ()) -> Tensor:
    """Pooled vectors, several poolings side by side, through the Dense layers: float[t, h] -> float32[n, d].

    Pooling sums and layers run in float32 whatever the trunk's dtype. Source: sentence-transformers Pooling and Dense.
    """
    pooled = torch.cat([POOLINGS[mode](hidden, layout) for mode in pooling], dim=1)
    for layer in layers:
        pooled = layer.activation(linear(pooled, layer.weight, layer.bias))
    return pooled


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
