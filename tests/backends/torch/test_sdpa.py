"""Both ways to use torch's attention, against the textbook's formula and against each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.sdpa import MASK_ENTRIES, PADDING_ALLOWED, like_lengths, padded_groups, per_sequence
from hybridtei.backends.torch.sequences import Kernel
from tests import tolerances
from tests.backends.torch import textbook

BOTH = pytest.mark.parametrize("kernel", [per_sequence, padded_groups])
LISTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_packed_attention_equals_the_textbook(kernel: Kernel, causal: bool, window: int | None, key_heads: int) -> None:
    q, k, v = textbook.drawn(textbook.LENGTHS, key_heads)
    found = kernel(q, k, v, textbook.sequences(textbook.LENGTHS), scale=0.7, window=window, causal=causal)
    expected = textbook.attention(q, k, v, textbook.LENGTHS, window=window, causal=causal)
    torch.testing.assert_close(found, expected, atol=tolerances.WEIGHTS["float32"], rtol=0)


@BOTH
def test_tokens_that_nobody_sees(kernel: Kernel) -> None:
    seen = [max(1, length - 2) for length in textbook.LENGTHS]
    q, k, v = textbook.drawn(textbook.LENGTHS)
    found = kernel(q, k, v, textbook.sequences(textbook.LENGTHS, seen), scale=0.7, window=None, causal=False)
    expected = textbook.attention(q, k, v, textbook.LENGTHS, window=None, causal=False, seen=seen)
    torch.testing.assert_close(found, expected, atol=tolerances.WEIGHTS["float32"], rtol=0)


@given(LISTS, st.sampled_from([None, 1, 7]), st.booleans(), st.sampled_from([4, 2]))
def test_groups_compute_what_each_sequence_does(lengths: list[int], window: int | None, causal: bool, key_heads: int) -> None:
    q, k, v = textbook.drawn(lengths, key_heads)
    alone, grouped = (
        kernel(q, k, v, textbook.sequences(lengths), scale=0.7, window=window, causal=causal)
        for kernel in (per_sequence, padded_groups)
    )
    torch.testing.assert_close(alone, grouped, atol=tolerances.WEIGHTS["float32"], rtol=0)


def test_layers_share_what_was_made_of_the_lengths() -> None:
    q, k, v = textbook.drawn(textbook.LENGTHS)
    lengths = textbook.sequences(textbook.LENGTHS)
    first = padded_groups(q, k, v, lengths, scale=0.7, window=5, causal=False)
    made = dict(lengths.kept)
    again = padded_groups(q, k, v, lengths, scale=0.7, window=5, causal=False)
    assert all(lengths.kept[key] is value for key, value in made.items())
    assert torch.equal(first, again)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=200))
def test_like_lengths_keep_the_budget_of_padding_and_lose_none(lengths: list[int]) -> None:
    groups = like_lengths(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest, useful = max(lengths[place] for place in group), sum(lengths[place] for place in group)
        assert longest * len(group) <= PADDING_ALLOWED * useful
        assert len(group) == 1 or len(group) * longest**2 <= MASK_ENTRIES


def test_equal_lengths_are_one_call() -> None:
    assert like_lengths([7] * 50) == [list(range(50))]
    assert len(like_lengths([5, 500, 5, 500])) == 2
