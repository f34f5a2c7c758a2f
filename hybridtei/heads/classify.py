"""Logits of a whole text, or of each token: the layers of a classifier's head, in float32 whatever the trunk's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import layer_norm, linear

from hybridtei.checkpoint.classifiers import ScorePooling
from hybridtei.heads.dense import DenseLayer
from hybridtei.trunk.layout import PackedLayout


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm with its parameters."""

    weight: Tensor
    bias: Tensor | None
    eps: float


Layer = DenseLayer | Norm

POOLINGS: Mapping[ScorePooling, Callable[[Tensor, PackedLayout], Tensor]] = {
    "cls": lambda hidden, layout: layout.first(hidden),
    "mean": lambda hidden, layout: layout.mean(hidden),
    "lasttoken": lambda hidden, layout: layout.last(hidden),
}


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
