"""The codec of encodings between the two processes."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Encoding
from hybridtei.server.engine_process import apart, joined

NUMBERS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9), st.integers(0, 1))
SHAPES = st.tuples(st.integers(1, 9), st.sampled_from([None, 0, 1]), NUMBERS)


@given(st.lists(SHAPES, min_size=1))
def test_joined_encodings_mean_the_same(shapes):
    encodings = [
        Encoding(np.arange(length), None if kind is None else np.full(length, kind), *numbers)
        for length, kind, numbers in shapes
    ]
    assert [(one.key, one.shared) for one in apart(*joined(encodings))] == [
        (one.key, one.shared) for one in encodings
    ]
    assert {field.name for field in fields(Encoding)} == {
        "input_ids",
        "token_type_ids",
        "unseen",
        "adapter",
        "shared",
        "route",
        # Of the answer, which the server's process makes
        "extent",
    }
