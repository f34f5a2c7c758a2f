"""Segments of rows in torch: each way to collapse a sequence equals the same done on each sequence
by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.heads import POOLINGS, Segments
from hybridtei.inference.backends.torch.ops import (
    TORCH,
    reduce_at_once,
    reduced_at_once,
    segment_max,
    segment_sum,
)

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def segments(lengths):
    offsets = offsets_of(lengths)
    return Segments(offsets, torch.as_tensor(offsets))


def rows(lengths, seed=0):
    return torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(seed)), segments(
        lengths
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_single_precision(dtype):
    # Neither 16-bit kind can count to 3000 by ones
    x = torch.full((3000, 2), 1.0, dtype=dtype)
    mean = POOLINGS["mean"](TORCH, x, segments([3000]))
    assert mean.dtype == torch.float32
    assert torch.equal(mean, torch.ones(1, 2))


@given(LENGTHS)
def test_one_reduction_over_all_sequences_equals_one_for_each(lengths):
    """What a GPU does for many sequences, done here."""
    x, at = rows(lengths)
    torch.testing.assert_close(reduced_at_once(x, at, "sum"), segment_sum(x, at))
    assert torch.equal(reduced_at_once(x, at, "max"), segment_max(x, at))


def test_sequences_are_reduced_one_by_one_where_one_is_long_for_their_number():
    assert reduce_at_once(8, 128, 768)
    assert not reduce_at_once(8, 129, 768)
    assert not reduce_at_once(9, 8192, 768)
    assert reduce_at_once(600, 8192, 768)
    assert reduce_at_once(1, 8192, 30522)
