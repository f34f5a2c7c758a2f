"""Both ways to use torch's attention, against the textbook's formula and against each other; and
our way to call flash attention, against the textbook: through what torch documents here, through
itself on a GPU."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.small import tolerances
from hybridtei.inference.backends.torch import kernels
from hybridtei.inference.backends.torch.kernels import (
    KERNELS,
    MASK_ENTRIES,
    PADDING_ALLOWED,
    UNBOUNDED,
    flash,
    like_lengths,
    padded_groups,
    per_sequence,
    window_of,
)
from tests.inference.backends.outputs import on_gpu
from tests.inference.backends.torch.attention import libraries, textbook
from tests.near import near
from tests.sampled import paired

LIBRARY = libraries.installed()
LISTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
WAYS = {
    "per sequence": per_sequence,
    "padded groups": padded_groups,
    "flash attention": flash,
}
EACH = pytest.mark.parametrize("kernel", WAYS.values(), ids=WAYS)
# The largest absolute deviation from SDPA, for normally distributed values: some units of the last
# place.
NEAR = {"float16": 1e-2, "bfloat16": 6e-2}
SEEN = [max(1, length - 2) for length in textbook.LENGTHS]


@EACH
@pytest.mark.parametrize(
    ("window", "key_heads", "causal"), paired([None, 1, 5, 100], [4, 2, 1], [False, True])
)
def test_packed_attention_equals_the_textbook(kernel, causal, window, key_heads):
    equals_the_textbook(kernel, window=window, key_heads=key_heads, causal=causal)


@EACH
@pytest.mark.parametrize("window", [None, 5, 23])
def test_tokens_that_none_attends_to_are_left_out(kernel, window):
    equals_the_textbook(kernel, window=window, seen=SEEN)


@pytest.mark.parametrize(("window", "calls"), [(None, 1), (8, 1), (7, 0)])
def test_queries_with_expansion_share_flash_attention_with_documents_longer_than_the_window(
    monkeypatch, window, calls
):
    """While the window holds each query. Its last token would meet too many keys else."""
    counted = []
    monkeypatch.setattr(kernels, "padded_groups", lambda *_: counted.append(_))
    lengths, seen = [8, 30, 5], [6, 30, 5]
    q, k, v = textbook.drawn(lengths)
    found = flash(q, k, v, textbook.sequences(lengths, seen), textbook.heads(window))
    assert len(counted) == 1 - calls
    if calls:
        expected = textbook.attention(q, k, v, lengths, window=window, causal=False, seen=seen)
        near(found, expected, tolerances.WEIGHTS["float32"])


def equals_the_textbook(
    kernel,
    *,
    window=None,
    key_heads=4,
    causal=False,
    seen=None,
):
    q, k, v = textbook.drawn(textbook.LENGTHS, key_heads)
    found = kernel(
        q, k, v, textbook.sequences(textbook.LENGTHS, seen), textbook.heads(window, causal=causal)
    )
    expected = textbook.attention(
        q, k, v, textbook.LENGTHS, window=window, causal=causal, seen=seen
    )
    near(found, expected, tolerances.WEIGHTS["float32"])


@given(LISTS, st.sampled_from([None, 1, 7]), st.booleans(), st.sampled_from([4, 2]))
def test_groups_compute_what_each_sequence_does(lengths, window, causal, key_heads):
    q, k, v = textbook.drawn(lengths, key_heads)
    alone, grouped = (
        kernel(q, k, v, textbook.sequences(lengths), textbook.heads(window, causal=causal))
        for kernel in (per_sequence, padded_groups)
    )
    near(alone, grouped, tolerances.WEIGHTS["float32"])


def test_layers_share_what_was_made_of_the_lengths():
    q, k, v = textbook.drawn(textbook.LENGTHS)
    lengths = textbook.sequences(textbook.LENGTHS)
    first = padded_groups(q, k, v, lengths, textbook.heads(5))
    groups, made = lengths.groups, [dict(group.cache) for group in lengths.groups.each]
    again = padded_groups(q, k, v, lengths, textbook.heads(5))
    assert lengths.groups is groups
    assert all(made)
    for group, values in zip(groups.each, made, strict=True):
        assert all(group.cache[key] is value for key, value in values.items())
    assert torch.equal(first, again)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=200))
def test_like_lengths_keep_the_budget_of_padding_and_lose_none(lengths):
    groups = like_lengths(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest, useful = (
            max(lengths[place] for place in group),
            sum(lengths[place] for place in group),
        )
        assert longest * len(group) <= PADDING_ALLOWED * useful
        assert len(group) == 1 or len(group) * longest**2 <= MASK_ENTRIES


def test_equal_lengths_are_one_call():
    assert like_lengths([7] * 50) == [list(range(50))]
    assert len(like_lengths([5, 500, 5, 500])) == 2


@given(st.one_of(st.none(), st.integers(1, 50)), st.booleans(), st.integers(1, 50))
def test_a_window_is_told_as_keys_before_and_after(window, causal, longest):
    before, after = window_of(window, causal, longest)
    for i in range(longest):
        for j in range(longest):
            ours = (window is None or abs(i - j) < window) and (not causal or j <= i)
            theirs = (before == UNBOUNDED or j >= i - before) and (
                after == UNBOUNDED or j <= i + after
            )
            assert ours == theirs


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_every_kernel_of_this_card_agrees(kernel):
    lengths = textbook.sequences(textbook.LENGTHS, device="cuda")
    cases = itertools.product(
        ("float16", "bfloat16"), (False, True), (None, 5), ((4, 64), (2, 128), (1, 64))
    )
    for dtype, causal, window, (key_heads, width) in cases:
        exact = textbook.drawn(textbook.LENGTHS, key_heads, width)
        heads = textbook.heads(window, causal=causal, scale=0.1)
        q, k, v = (x.to("cuda", getattr(torch, dtype)) for x in exact)
        states = kernel(q, k, v, lengths, heads).float().cpu()
        q, k, v = (x.float().cpu() for x in (q, k, v))
        expected = per_sequence(q, k, v, textbook.sequences(textbook.LENGTHS), heads)
        near(states, expected, NEAR[dtype])
