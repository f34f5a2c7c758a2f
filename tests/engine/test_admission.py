"""Permits: all or none, at once, and always given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.engine.admission import Admission
from hybridtei.errors import Overloaded


@given(st.integers(1, 20), st.lists(st.integers(1, 20)))
def test_permits_are_never_negative_and_all_come_back(permits, requests):
    admission = Admission(permits)
    for inputs in requests:
        if inputs > permits:
            with pytest.raises(Overloaded), admission.inside(inputs):
                pass
        else:
            with admission.inside(inputs):
                assert admission.free == permits - inputs
        assert admission.free == permits


def test_they_come_back_from_a_failure():
    admission = Admission(3)

    def fail() -> None:
        with admission.inside(3):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert admission.free == 3


def test_a_full_house_takes_nothing():
    admission = Admission(4)
    with admission.inside(3):
        with pytest.raises(Overloaded, match=r"^Model is overloaded$"), admission.inside(2):
            pass
        assert admission.free == 1
