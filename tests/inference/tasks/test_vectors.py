"""Cutting and normalising."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from conformance.small import tolerances
from hybridtei.inference.tasks.embed import cosine
from hybridtei.outputs import cut, unit
from tests.near import near, same

NUMBERS = st.floats(-1e3, 1e3, width=32).filter(lambda number: number == 0 or abs(number) > 1e-6)
ROWS = arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 9)), elements=NUMBERS)


@given(ROWS)
def test_rows_have_length_one_or_stay_zero(rows):
    made = unit(rows)
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert made.dtype == np.float32
    for row, norm, before in zip(made, norms, rows, strict=True):
        if norm:
            near(np.linalg.norm(row), 1, tolerances.UNIT["float32"])
            near(row, before / norm, tolerances.UNIT["float32"])
        else:
            assert not row.any()


@given(ROWS, st.integers(1, 12))
def test_cut_keeps_the_first_columns(rows, dimensions):
    same(cut(rows, dimensions), rows[:, :dimensions])
    assert cut(rows, None) is rows


def test_large_numbers_do_not_overflow():
    assert unit(np.array([[3e30, 4e30]], dtype=np.float32))[0].tolist() == pytest.approx([0.6, 0.8])


def test_rows_of_almost_nothing_do_not_become_large():
    assert np.abs(unit(np.full((1, 2), 1e-20, dtype=np.float32))).max() < 1e-6


def test_cosine_ignores_lengths():
    one, many = (
        np.array([2.0, 0.0], dtype=np.float32),
        np.array([[5, 0], [-1, 0], [0, 3], [1, 1]], dtype=np.float32),
    )
    assert cosine(one, many).tolist() == pytest.approx([1, -1, 0, 0.5**0.5], abs=1e-6)
