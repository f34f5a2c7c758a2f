"""MessagePack: what any reader unpacks is what was there."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.server.http.writers import Fragment, to_msgpack


def through(answer):
    return msgspec.msgpack.decode(to_msgpack(answer))


@given(st.integers(0, 40), st.integers(0, 40))
def test_matrices_of_every_small_shape(rows, columns):
    matrix = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    assert through(matrix) == matrix.tolist()
    assert through(matrix[:, ::2]) == matrix[:, ::2].tolist()
    for row in matrix[:1]:
        assert through(row) == row.tolist()


@pytest.mark.parametrize("length", [0, 15, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (65_535, 65_536))])
def test_lengths_at_which_the_head_changes(length):
    row = np.arange(length, dtype=np.float32)
    assert through(row) == row.tolist()
    column = np.ones((length, 1), dtype=np.float32)
    assert through(column) == column.tolist()


def test_numbers_of_every_kind():
    answer = {
        "f": np.float32(0.1),
        "h": np.array([0.5], dtype=np.float16),
        "i": np.array([-128, 127], dtype=np.int8),
        "u": np.array([[255]], dtype=np.uint8),
        "n": np.int64(7),
        "raw": Fragment(b'[{"index":1,"value":0.5}]'),
        "none": None,
    }
    wanted = {
        "f": float(np.float32(0.1)),
        "h": [0.5],
        "i": [-128, 127],
        "u": [[255]],
        "n": 7,
        "raw": [{"index": 1, "value": 0.5}],
    }
    assert through(answer) == {**wanted, "none": None}
    assert math.isnan(through(np.array([np.nan], dtype=np.float32))[0])
    assert len(to_msgpack(np.zeros((100, 384), dtype=np.float32))) == 3 + 100 * (3 + 5 * 384)


def test_what_has_no_form_is_a_defect():
    with pytest.raises(TypeError):
        to_msgpack(object())
