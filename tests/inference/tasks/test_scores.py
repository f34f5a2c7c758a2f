"""Activations and orders, against scipy and torch, and at the edges of float32."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridtei.errors import NotANumber
from hybridtei.inference.tasks.label import probabilities
from hybridtei.outputs import best_first, refuse_nan
from tests.near import near

logits = arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    elements=st.floats(-100, 100, width=32),
)


@given(logits)
def test_several_labels_sum_to_one_and_one_is_a_sigmoid(values):
    scores = probabilities(values)
    assert scores.dtype == np.float32
    if values.shape[1] == 1:
        near(scores, 1 / (1 + np.exp(-values.astype(np.float64))), 1e-6)
    else:
        near(scores.sum(axis=1), 1, 1e-6)


def test_logits_at_the_end_of_float32_overflow_to_nothing():
    rows = np.array([[-3e38, 3e38], [88, -200], [1000, 1000]], dtype=np.float32)
    near(probabilities(rows), [[0, 1], [1, 0], [0.5, 0.5]], 1e-6)
    ends = np.array([[-3e38], [3e38], [-104], [0]], dtype=np.float32)
    near(probabilities(ends), [[0], [1], [0], [0.5]], 1e-6)


def test_each_label_by_itself():
    near(
        probabilities(np.array([[0, 2]], np.float32), multi_label=True),
        [[0.5, 0.880797]],
        1e-6,
    )


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30))
def test_the_best_first_and_ties_in_reverse_order(values):
    order = best_first(np.array(values, dtype=np.float32)).tolist()
    assert order == sorted(range(len(values)), key=lambda i: (values[i], i), reverse=True)


def test_what_is_no_number_is_refused_and_infinity_is_one():
    with pytest.raises(NotANumber, match=r"^score is NaN$"):
        refuse_nan(np.array([[0.1], [np.nan]], np.float32))
    assert refuse_nan(np.array([np.inf], np.float32))[0] == np.inf
