"""Ragged arrays against lists of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.ragged import Ragged, gather_index, offsets_of

ROWS = st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=6), min_size=1, max_size=8)


def ragged(rows: list[list[float]]) -> Ragged:
    return Ragged.from_rows([np.array(row, dtype=np.float32) for row in rows])


def lists(value: Ragged) -> list[list[float]]:
    return [row.tolist() for row in value]


@given(ROWS)
def test_rows_come_out_as_they_went_in(rows: list[list[float]]) -> None:
    value = ragged(rows)
    assert lists(value) == rows
    assert len(value) == len(rows)
    assert value.lengths.tolist() == [len(row) for row in rows]


@given(ROWS, st.data())
def test_take_picks_rows_in_the_order_asked_for(rows: list[list[float]], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    assert lists(ragged(rows).take(picked)) == [rows[i] for i in picked]


@given(ROWS, ROWS)
def test_concat_joins_rows(one: list[list[float]], other: list[list[float]]) -> None:
    joined = Ragged.concat([ragged(one), ragged(other)])
    assert lists(joined) == one + other
    assert lists(joined.take(range(len(one), len(one) + len(other)))) == other


@given(ROWS)
def test_taking_all_rows_is_identity(rows: list[list[float]]) -> None:
    value = ragged(rows)
    again = value.take(range(len(rows)))
    assert np.array_equal(again.values, value.values)
    assert np.array_equal(again.offsets, value.offsets)


def test_rows_may_have_dimensions_of_their_own() -> None:
    rows = [np.arange(6.0).reshape(2, 3), np.zeros((0, 3)), np.ones((1, 3))]
    value = Ragged.from_rows(rows)
    assert value.values.shape == (3, 3)
    assert [row.shape for row in value.take([2, 1])] == [(1, 3), (0, 3)]


def test_a_row_is_a_view() -> None:
    value = ragged([[1.0, 2.0], [3.0]])
    assert np.shares_memory(value.row(1), value.values)
    assert not np.shares_memory(value.take([1]).values, value.values)


def test_offsets_begin_with_zero_and_are_one_more() -> None:
    assert offsets_of([]).tolist() == [0]
    assert offsets_of([3, 0, 2]).tolist() == [0, 3, 3, 5]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_gathering_every_row_reads_the_values_in_order(lengths: list[int]) -> None:
    offsets = offsets_of(lengths)
    assert gather_index(offsets, range(len(lengths))).tolist() == list(range(sum(lengths)))
