"""The kernels behind `Layout.attend`. Today one: SDPA, sequence by sequence, which honours windows and causality anywhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def sdpa_per_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    scale: float,
    window: int | None,
    causal: bool,
    seen: list[int] | None = None,
) -> Tensor:
    """Attention of packed sequences, one SDPA call each: on a CPU this costs less than the padding it avoids.

    `seen`: of each sequence only so many tokens from the first on are keys.
    """
    out = torch.empty_like(q)
    start = 0
    for length, keys in zip(lengths, seen or lengths, strict=True):
        rows, others = slice(start, start + length), slice(start, start + keys)
        mask = _mask(length, window, causal, q.device)
        out[rows] = _one_sequence(q[rows], k[others], v[others], scale, None if mask is None else mask[:, :keys])
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
