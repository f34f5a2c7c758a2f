"""Query, key and value by one product where a family has three Linear layers for them: one launch instead of three.

No family's code is touched: the layer it calls first computes all three parts and keeps two of them for the calls that follow
with the same tensor. What is kept is only a shortcut: a call with any other tensor, from another thread or in
another order, computes its part by itself, so nothing depends on who called before. What is kept is let go with the last part.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

NAMES = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"))


class First(nn.Module):
    """In the place of the first of some Linear layers of one input. `all`: the product of all, eight bits allowed."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.all: nn.Module = _joined(linears)
        self.widths = [linear.out_features for linear in linears]
        self.held: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        parts = self._parts(x)
        self.held = (x, parts)
        return parts[0]

    def part(self, x: Tensor, place: int) -> Tensor:
        """What the layer that was at this place computes of x."""
        held = self.held  # read once: another thread may put its own here at any time
        if held is None or held[0] is not x:
            return self._parts(x)[place]
        if place == len(self.widths) - 1:
            self.held = None
        return held[1][place]

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], self.all(x).split(self.widths, -1))


class Later(nn.Module):
    """In the place of another of them."""

    def __init__(self, first: First, place: int) -> None:
        super().__init__()
        self._first = (first,)  # in a tuple, as a module has one place in a model
        self._place = place

    def forward(self, x: Tensor) -> Tensor:
        return self._first[0].part(x, self._place)


def fuse(model: Any) -> int:
    """Join the Linear layers of query, key and value throughout a model; how many threes there were."""
    made = 0
    for module in [*model.modules()]:
        for names in NAMES:
            linears = [getattr(module, name, None) for name in names]
            if _fit(linears):
                first = First(cast(list[nn.Linear], linears))
                for place, name in enumerate(names):
                    setattr(module, name, Later(first, place) if place else first)
                made += 1
    return made


def _fit(linears: list[Any]) -> bool:
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    return len({(linear.in_features, linear.bias is None) for linear in linears}) == 1


def _joined(linears: list[nn.Linear]) -> nn.Linear:
    first = linears[0]
    with torch.device("meta"):
        fused = nn.Linear(first.in_features, sum(linear.out_features for linear in linears), bias=first.bias is not None)
    fused.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if first.bias is not None:
        biases = [linear.bias.detach() for linear in linears]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused.eval()
