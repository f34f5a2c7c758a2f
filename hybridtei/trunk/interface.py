"""How transformers' modules come to ask our layout: the attention function registered under our name.

They call it with `[1, heads, t, head_dim]` tensors and with every keyword argument the model was called with, our `layout`
among them. No mask is ever built: the layout says who sees whom. transformers builds none for an attention it knows no mask
function of, which is why none is registered: to ask one, it would first look for packed texts, and wait for the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.trunk.layout import Layout

NAME = "hybridtei"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


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
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    return NAME
