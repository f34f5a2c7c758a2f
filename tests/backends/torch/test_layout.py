"""PackedLayout: every way to collapse a sequence equals the same done on each sequence by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.layout import PackedLayout, reduce_at_once
from hybridtei.batch import offsets_of

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def rows(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, PackedLayout]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), 5, generator=draw), PackedLayout(offsets_of(lengths))


@given(LENGTHS)
def test_each_way_to_collapse_equals_a_loop_over_sequences(lengths: list[int]) -> None:
    x, layout = rows(lengths)
    parts = torch.split(x, lengths)
    assert torch.equal(layout.first(x), torch.stack([part[0] for part in parts]))
    assert torch.equal(layout.last(x), torch.stack([part[-1] for part in parts]))
    assert torch.equal(layout.max(x), torch.stack([part.max(0).values for part in parts]))
    torch.testing.assert_close(layout.mean(x), torch.stack([part.mean(0) for part in parts]))
    torch.testing.assert_close(layout.sum(x), torch.stack([part.sum(0) for part in parts]))


@given(LENGTHS)
def test_places_count_from_zero_in_each_sequence(lengths: list[int]) -> None:
    _, layout = rows(lengths)
    assert layout.places().tolist() == [place for length in lengths for place in range(length)]
    assert layout.counts.flatten().tolist() == lengths


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_single_precision(dtype: torch.dtype) -> None:
    x = torch.full((3000, 2), 1.0, dtype=dtype)  # neither 16-bit kind can count to 3000 by ones
    mean = PackedLayout(offsets_of([3000])).mean(x)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, torch.ones(1, 2))


@given(LENGTHS)
def test_one_reduction_over_all_sequences_equals_one_for_each(lengths: list[int]) -> None:
    """What a GPU does for many sequences, done here."""
    x, layout = rows(lengths)
    torch.testing.assert_close(layout._reduced(x, "sum"), layout.sum(x))
    assert torch.equal(layout._reduced(x, "max"), layout.max(x))


def test_sequences_are_reduced_one_by_one_where_one_is_long_for_their_number() -> None:
    assert reduce_at_once(8, 128)
    assert not reduce_at_once(8, 129)
    assert not reduce_at_once(9, 8192)
    assert reduce_at_once(600, 8192)
