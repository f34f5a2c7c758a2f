"""Packed attention against the textbook formula, one sequence, one head and one query at a time."""

from __future__ import annotations

import pytest
import torch

from hybridtei.ragged import offsets_of
from hybridtei.trunk.layout import PackedLayout
from tests import tolerances

LENGTHS = [1, 9, 4, 23, 2]
WIDTH = 8


def textbook(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, causal: bool
) -> torch.Tensor:
    """softmax(q k) v over what each query may see; k and v of one group of query heads are shared."""
    out = torch.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    start = 0
    for length in LENGTHS:
        for head in range(q.shape[1]):
            keys, values = k[start : start + length, head // groups], v[start : start + length, head // groups]
            for i in range(length):
                seen = [j for j in range(length) if (window is None or abs(i - j) < window) and (not causal or j <= i)]
                weights = torch.softmax(scale * keys[seen] @ q[start + i, head], 0)
                out[start + i, head] = weights @ values[seen]
        start += length
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_packed_attention_equals_the_textbook(causal: bool, window: int | None, key_heads: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(sum(LENGTHS), 4, WIDTH, generator=draw)
    k, v = (torch.randn(sum(LENGTHS), key_heads, WIDTH, generator=draw) for _ in range(2))
    ours = PackedLayout(offsets_of(LENGTHS)).attend(q, k, v, scale=0.7, window=window, causal=causal)
    expected = textbook(q, k, v, scale=0.7, window=window, causal=causal)
    torch.testing.assert_close(ours, expected, atol=tolerances.WEIGHTS["float32"], rtol=0)
