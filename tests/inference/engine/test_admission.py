"""Permits: all or none, at once, and always given back."""

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Encoding, Head, Positions
from hybridtei.errors import Overloaded
from hybridtei.inference.engine.admission import Admission, max_of_turns, permits_for
from hybridtei.inference.engine.core import EngineCore
from tests.fake_backend import FakeBackend
from tests.inference.engine import small


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


@pytest.mark.parametrize(
    ("budget", "length"),
    [(16384, 16), (16384, 50), (16384, 512), (4096, 16), (65536, 50), (512, 333)],
)
def test_on_a_gpu_permits_of_short_texts_fill_every_pass_under_way(budget, length):
    """And the core, asked for one pass after the other, finds that many in what waits."""
    backend = FakeBackend(small.model_spec())
    backend.ahead = 1
    permits = permits_for(512, backend, budget)
    core = EngineCore(max_tokens=budget, positions=Positions())
    core.add(
        [Encoding(np.full(length, number)) for number in range(permits)], frozenset({Head.DENSE})
    )
    passes = [core.take(device_idle=False) for _ in range(len(backend.lanes) + backend.ahead)]
    assert all(batch is not None and budget - length < batch.tokens <= budget for batch in passes)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_on_a_cpu_permits_do_not_follow_the_budget(permits, budget):
    assert permits_for(permits, FakeBackend(small.model_spec()), budget) == permits


def test_they_come_back_from_a_failure():
    admission = Admission(3)

    def fail():
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


def test_large_ones_leave_a_quarter_to_small_ones():
    admission = Admission(16)
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


@given(st.integers(1, 1000))
def test_a_house_of_any_size_lets_large_ones_in(permits):
    admission, most = Admission(permits), max_of_turns(permits)
    with admission.inside(most, turns=True):
        assert 0 <= admission.free == permits - most
    assert admission.free == permits


async def test_carried_permits_serve_in_tasks_too_and_nowhere_else():
    admission = Admission(1)

    async def enter(inputs):
        with admission.inside(inputs):
            await asyncio.sleep(0)

    admission.take(1)
    with admission.carrying(1):
        await enter(1)
        await asyncio.gather(enter(1), enter(1))
        with pytest.raises(Overloaded):
            await enter(2)
    with pytest.raises(Overloaded):
        await enter(1)
    admission.give_back(1)
    await enter(1)
