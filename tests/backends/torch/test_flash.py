"""Our way to call each flash library, against the textbook: through what they document here, through themselves on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch import attention, choice
from hybridtei.backends.torch.flash import UNBOUNDED, named, of_torch, varlen, window_of
from hybridtei.backends.torch.sdpa import padded_groups, per_sequence
from hybridtei.backends.torch.sequences import Kernel
from tests import tolerances
from tests.backends.torch import libraries, textbook
from tests.sampled import crossed

DOCUMENTED = {
    "flash-attn 2": varlen(named(libraries.flash_attn_2)),
    "flash-attn 4": varlen(named(libraries.flash_attn_4, unbounded=None)),
    "varlen_attn": varlen(of_torch(libraries.varlen_attn)),
    "varlen_attn of 2.11": varlen(of_torch(libraries.varlen_attn_of_2_11)),
}
EACH = pytest.mark.parametrize("kernel", DOCUMENTED.values(), ids=DOCUMENTED)
ON_GPU = {
    choice.FLASH_2: attention.OPENERS[choice.FLASH_2],
    choice.FLASH_4: attention.OPENERS[choice.FLASH_4],
    choice.TORCH_VARLEN: attention.OPENERS[choice.TORCH_VARLEN],
    choice.PADDED: lambda: padded_groups,
    choice.PER_SEQUENCE: lambda: per_sequence,
}


@EACH
@pytest.mark.parametrize(("window", "key_heads", "causal"), crossed([None, 1, 5, 100], [4, 2, 1], [False, True]))
def test_each_library_is_asked_for_the_textbook(kernel: Kernel, causal: bool, window: int | None, key_heads: int) -> None:
    q, k, v = textbook.drawn(textbook.LENGTHS, key_heads)
    found = kernel(q, k, v, textbook.sequences(textbook.LENGTHS), scale=0.7, window=window, causal=causal)
    expected = textbook.attention(q, k, v, textbook.LENGTHS, window=window, causal=causal)
    torch.testing.assert_close(found, expected, atol=tolerances.WEIGHTS["float32"], rtol=0)


@EACH
@pytest.mark.parametrize("window", [None, 5])
def test_tokens_that_nobody_sees(kernel: Kernel, window: int | None) -> None:
    seen = [max(1, length - 2) for length in textbook.LENGTHS]
    q, k, v = textbook.drawn(textbook.LENGTHS)
    lengths = textbook.sequences(textbook.LENGTHS, seen)
    found = kernel(q, k, v, lengths, scale=0.7, window=window, causal=False)
    expected = textbook.attention(q, k, v, textbook.LENGTHS, window=window, causal=False, seen=seen)
    torch.testing.assert_close(found, expected, atol=tolerances.WEIGHTS["float32"], rtol=0)


@pytest.mark.parametrize("window", [None, 5, 30])
def test_a_bound_is_told_instead_of_the_longest(window: int | None) -> None:
    told: list[tuple[int, int]] = []

    def call(q, k, v, asked):
        told.append(asked.longest)
        return q

    q, k, v = textbook.drawn(textbook.LENGTHS)
    given = textbook.sequences(textbook.LENGTHS)
    given.bound = 64
    varlen(call)(q, k, v, given, scale=0.7, window=window, causal=False)
    assert told == [(64, 64)]


@given(st.one_of(st.none(), st.integers(1, 50)), st.booleans(), st.integers(1, 50))
def test_a_window_is_told_as_keys_before_and_after(window: int | None, causal: bool, longest: int) -> None:
    before, after = window_of(window, causal, longest)
    for i in range(longest):
        for j in range(longest):
            ours = (window is None or abs(i - j) < window) and (not causal or j <= i)
            theirs = (before == UNBOUNDED or j >= i - before) and (after == UNBOUNDED or j <= i + after)
            assert ours == theirs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("open_kernel", ON_GPU.values(), ids=ON_GPU)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("key_heads", "width"), [(4, 64), (2, 128), (1, 64)])
def test_every_kernel_of_this_card_agrees(
    open_kernel: Callable[[], Kernel], dtype: str, causal: bool, window: int | None, key_heads: int, width: int
) -> None:
    try:
        kernel = open_kernel()
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    exact = textbook.drawn(textbook.LENGTHS, key_heads, width)
    q, k, v = (x.to("cuda", getattr(torch, dtype)) for x in exact)
    lengths = textbook.sequences(textbook.LENGTHS, device="cuda")
    found = kernel(q, k, v, lengths, scale=0.1, window=window, causal=causal).float().cpu()
    q, k, v = (x.float().cpu() for x in (q, k, v))
    expected = per_sequence(q, k, v, textbook.sequences(textbook.LENGTHS), scale=0.1, window=window, causal=causal)
    torch.testing.assert_close(found, expected, atol=attention.TOLERANCE[dtype], rtol=0)
