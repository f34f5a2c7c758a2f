"""The kernels behind `Layout.attend`, and their registration with transformers.

transformers' modules call the function registered under our name with `[1, heads, t, head_dim]` tensors and with every
keyword argument the model was called with, our `layout` among them. No mask is ever built: the layout says who sees whom.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.trunk.layout import Layout

NAME = "hybridtei"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def sdpa_per_sequence(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], *, scale: float, window: int | None, causal: bool
) -> Tensor:
    """Attention of packed sequences, one SDPA call each: on a CPU this costs less than the padding it avoids."""
    out = torch.empty_like(q)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        out[rows] = _one_sequence(q[rows], k[rows], v[rows], scale, _mask(length, window, causal, q.device))
        start += length
    return out


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _mask(length: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """bool[length, length], True where a query (row) sees a key (column); None where it sees all."""
    if not causal and (window is None or length <= window):
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance.abs() < window
    if causal:
        seen &= distance >= 0
    return seen


def is_causal(module: Any) -> bool:
    """Whether an attention module looks back only; embedders derived from decoders say no in their configuration."""
    config = getattr(module, "config", None)
    if getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None):
        return False
    return bool(getattr(module, "is_causal", False))


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [1, heads, t, head_dim] -> [1, t, heads, head_dim]."""
    for name in UNSUPPORTED:
        if rest.get(name) is not None:
            raise UnsupportedArchitecture(f"{type(module).__name__}: attention with `{name}` is not served packed")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and module.is_causal and getattr(module.config, "is_causal", None) is False:
        sliding_window += 1  # transformers counts a window inclusively once a decoder looks both ways
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return layout.attend(q, k, v, scale=scale, window=sliding_window, causal=is_causal(module))[None], None


def register() -> str:
    """Make our attention known to transformers; the name to load models with."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME
