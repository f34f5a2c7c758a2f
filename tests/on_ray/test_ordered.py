"""Blocks come out in the order of their numbers, whatever order they came in."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import BackendError
from hybridtei.on_ray.blocks import in_order

SIZES = st.lists(st.integers(0, 8), min_size=1, max_size=4)


@given(SIZES, st.randoms(use_true_random=False), st.booleans())
def test_each_reader_in_its_order_none_lost_none_twice(sizes, random, twice):
    blocks = [(reader, number, f"{reader}/{number}") for reader, size in enumerate(sizes) for number in range(size)]
    arriving = blocks * 2 if twice else list(blocks)
    random.shuffle(arriving)
    found = list(in_order(arriving))
    assert sorted(found) == sorted((reader, block) for reader, _, block in blocks)
    for reader, mine in groupby(sorted(found, key=lambda one: one[0]), key=lambda one: one[0]):
        assert [block for _, block in mine] == [f"{reader}/{number}" for number in range(sizes[reader])]


def test_what_comes_in_order_is_not_held():
    given_out = in_order((reader, number, None) for number in range(3) for reader in range(2))
    assert next(given_out) == (0, None)


def test_a_block_that_never_came_is_told_of():
    with pytest.raises(BackendError, match="lost block 1 of reader 7"):
        list(in_order([(7, 0, "a"), (7, 2, "c"), (3, 0, "x")]))
