"""A large answer is written piece by piece: the same bytes, and no call writes many values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtei.server import answers

# Small, so that small values are large answers
ITEMS, VALUES, CHARACTERS = 4, 40, 100
SCALARS = st.none() | st.integers(-9, 9) | st.floats(0, 1, width=32) | st.text(max_size=300)
ARRAYS = st.builds(np.ones, st.integers(0, 900)) | st.builds(
    np.ones, st.tuples(st.integers(0, 30), st.integers(0, 30))
)
NESTED = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=3), inner, max_size=30)
    ),
    max_leaves=60,
)


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "PIECE_ITEMS", ITEMS)
        patch.setattr(answers, "PIECE_VALUES", VALUES)
        patch.setattr(answers, "PIECE_CHARACTERS", CHARACTERS)
        yield


@pytest.fixture(autouse=True, scope="module")
def written(small):
    """The values that calls of `to_json` have written."""
    real, values = answers.to_json, []

    def to_json(answer):
        values.append(answer)
        return real(answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "to_json", to_json)
        yield values


def weight(value):
    """What a value counts, in the units of `PIECE_VALUES`."""
    if isinstance(value, str):
        return len(value) * VALUES / CHARACTERS
    if isinstance(value, np.ndarray):
        return value.size / answers.ARRAY_SHARE
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(weight, value)) if isinstance(value, list) else 1


@settings(max_examples=50)
@given(NESTED)
def test_the_bytes_are_those_of_one_call(written, value):
    assert answers.piecewise(value) == answers.orjson.dumps(
        value, option=answers.orjson.OPT_SERIALIZE_NUMPY
    )


@settings(max_examples=50)
@given(NESTED)
def test_no_call_writes_more_than_its_share(written, value):
    written.clear()
    answers.piecewise(value)
    for part in written:
        # A row of numbers cannot be divided
        if not isinstance(part, np.ndarray) or part.ndim != 1:
            assert weight(part) <= VALUES


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        # A value counts once when it is seen in its list, and once more when it is read
        ([None] * 19, 1),
        ([None] * 20, 5),
        ("a" * 98, 1),
        ("a" * 201, 3),
        (np.ones(39 * answers.ARRAY_SHARE - 1), 1),
        (np.ones((39, answers.ARRAY_SHARE)), 39),
    ],
)
def test_small_values_are_written_by_one_call(written, value, calls):
    written.clear()
    answers.piecewise(value)
    assert len(written) == calls


@given(st.lists(SCALARS, max_size=30))
def test_an_iterator_is_a_list(written, items):
    assert answers.piecewise(iter(items)) == answers.piecewise(items)
    assert answers.piecewise({"a": iter(items)}) == answers.piecewise({"a": items})
