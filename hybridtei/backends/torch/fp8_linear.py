"""Matrices in fp8: weights in eight bits with a scale for each output channel, activations with one for each row (a row is a
token, so a text's vectors do not depend on its neighbours), products summed in float32.

There is no calibration: the rows' scales are taken as they come. Whether a model bears it is `fp8`'s to judge.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max
MIN_SCALE = 1e-12  # of a row of zeros
STEP = 16  # both sides of a matrix must be a multiple of it


class Fp8Linear(nn.Module):
    """A Linear layer in eight bits. While `exact` is kept, `judging` decides which of the two computes."""

    judging = False

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantised(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.exact: nn.Linear | None = linear

    def forward(self, x: Tensor) -> Tensor:
        if self.judging and self.exact is not None:
            return self.exact(x)  # type: ignore[no-any-return]
        rows, scales = quantised(x.reshape(-1, x.shape[-1]))
        out = product(rows, scales, cast(Tensor, self.weight), cast(Tensor, self.scale), x.dtype)
        return (out if self.bias is None else out + self.bias).reshape(*x.shape[:-1], -1)


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float[n, k] -> (eight bits [n, k], float32 scale [n, 1]): the largest of each row becomes the largest there is."""
    rows = rows.float()
    scale = (rows.abs().amax(1, keepdim=True) / LARGEST).clamp_min(MIN_SCALE)
    return (rows / scale).clamp(-LARGEST, LARGEST).to(EIGHT_BITS), scale


def product(rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n, k] times weight [m, k], each with scales [n, 1] and [m, 1] -> dtype[n, m]."""
    if rows.device.type == "cuda":
        return torch._scaled_mm(rows, weight.t(), scale_a=row_scales, scale_b=weight_scales.t(), out_dtype=dtype)
    return emulated(rows, row_scales, weight, weight_scales).to(dtype)


def emulated(rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """`product` in float32, on whatever device: the same factors, summed in another order."""
    return (rows.float() @ weight.float().t()) * row_scales * weight_scales.t()


def replace_linears(model: Any) -> list[Fp8Linear]:
    """Put eight bits in the place of every Linear layer whose shape allows it; the new layers."""
    made = []
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.Linear and not (child.in_features % STEP or child.out_features % STEP):
                layer = Fp8Linear(child)
                setattr(module, name, layer)
                made.append(layer)
    return made
