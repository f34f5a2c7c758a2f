"""Permits: all or none, at once, and always given back."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.engine.admission import Admission, max_of_turns, shared_memory
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


@pytest.mark.parametrize("kind", ["one process", "several"])
def test_large_ones_leave_a_quarter_to_small_ones(kind):
    memory = shared_memory(1)
    admission = Admission(16) if kind == "one process" else Admission(16, memory, 0)
    with ExitStack() as inside:
        for _ in range(3):
            inside.enter_context(admission.inside(4, turns=True))
        with pytest.raises(Overloaded), admission.inside(1, turns=True):
            raise AssertionError
        for _ in range(4):
            inside.enter_context(admission.inside(1))
        with pytest.raises(Overloaded), admission.inside(1):
            raise AssertionError
    assert admission.free == 16
    os.close(memory)


@given(st.integers(1, 1000))
def test_a_house_of_any_size_lets_large_ones_in(permits):
    admission, most = Admission(permits), max_of_turns(permits)
    with admission.inside(most, turns=True):
        assert 0 <= admission.free == permits - most
    assert admission.free == permits
