"""One vector a token, for late interaction. Raw: not cut, not normalised, in the trunk's precision: `host_copy` widens."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def multivector(hidden: Tensor, kept: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project the kept tokens: float[t, h], bool[t] -> float[t', d]. Source: BGE-M3, Chen et al. 2024, section 3.2."""
    return linear(hidden[kept], weight, bias)
