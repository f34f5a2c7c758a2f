"""Attention by its formula, one sequence, one head and one query at a time; and lengths that
kernels find hard."""

import torch

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.torch.kernels import Sequences
from hybridtei.models.families.ops import Heads

LENGTHS = [1, 9, 4, 23, 2, 17, 8, 16, 1]
HEADS = 4


def attention(
    q,
    k,
    v,
    lengths,
    *,
    window,
    causal,
    seen=None,
):
    """softmax(0.7 q k) v over what each query may see; k and v of one group of query heads are
    shared."""
    out = torch.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    start = 0
    for length, keys_of in zip(lengths, seen or lengths, strict=True):
        for head in range(q.shape[1]):
            keys, values = (
                k[start : start + length, head // groups],
                v[start : start + length, head // groups],
            )
            for i in range(length):
                others = [
                    j
                    for j in range(keys_of)
                    if (window is None or abs(i - j) < window) and (not causal or j <= i)
                ]
                weights = torch.softmax(0.7 * keys[others] @ q[start + i, head], 0)
                out[start + i, head] = weights @ values[others]
        start += length
    return out


def drawn(lengths, key_heads=HEADS, width=8, seed=0):
    """q, k, v."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(lengths), heads, width, generator=draw)
        for heads in (HEADS, key_heads, key_heads)
    )
    return q, k, v


def sequences(lengths, seen=None, device="cpu"):
    return Sequences(lengths, torch.as_tensor(offsets_of(lengths), device=device), seen)


def heads(window=None, *, causal=False, scale=0.7):
    """Kernels read these three; the sizes are the tensors'."""
    return Heads(HEADS, HEADS, 8, factor=scale, causal=causal, window=window)
