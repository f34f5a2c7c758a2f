"""A bound counts what all hold; large holders leave a share, and who has held most for longest
ends."""

import asyncio
from contextlib import ExitStack
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import Overloaded
from hybridtei.limits import SMALL_BYTES, Bound, most_of_large


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.booleans()), max_size=40))
def test_what_is_held_is_what_was_taken_and_not_given_back(steps):
    bound, held = Bound(100), []
    for takes, units, is_large in steps:
        if takes:
            fits = bound.units + units <= (75 if is_large else 100)
            assert bound.has_room(units, is_large=is_large) == fits
            if fits:
                bound.take(units, is_large=is_large)
                held.append(units)
            else:
                with pytest.raises(Overloaded):
                    bound.take(units, is_large=is_large)
        elif held:
            bound.give_back(held.pop())
        assert bound.units == sum(held)
        assert bound.free == 100 - sum(held)


@given(st.lists(st.integers(0, 3 * SMALL_BYTES), min_size=1, max_size=10), st.integers(4, 6))
def test_one_holder_alone_takes_what_it_likes_and_gives_back_what_it_took(parts, millions):
    bound = Bound(millions * SMALL_BYTES)
    with bound.inside(0) as holder:
        for units in parts:
            holder.take(units)
        assert bound.units == holder.units <= min(sum(parts), bound.limit)
    assert bound.units == 0


async def test_the_holder_of_most_for_longest_ends():
    now = [0.0]
    bound = Bound(100, clock=lambda: now[0])
    ended = []

    async def hold(name, units, release):
        try:
            with bound.inside(0) as holder:
                await holder.within(inf, taking(holder, units, release))
        except Overloaded:
            ended.append(name)

    async def taking(holder, units, release):
        holder.take(units)
        await release.wait()

    release = asyncio.Event()
    tasks = []
    for name, units, at in (("much", 60, 0), ("long", 30, 1), ("little", 5, 2), ("next", 50, 10)):
        now[0] = at
        tasks.append(asyncio.ensure_future(hold(name, units, release)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert ended == ["much"]
    assert bound.units == 30 + 5 + 50
    release.set()
    await asyncio.gather(*tasks)
    assert bound.units == 0
    assert not bound.waiting


async def test_a_holder_that_asks_for_more_than_there_is_ends_itself():
    bound = Bound(100)
    bound.take(50)

    async def take():
        holder.take(60)

    with bound.inside(0) as holder, pytest.raises(Overloaded):
        await holder.within(inf, take())
    assert bound.units == 50


async def test_a_wait_within_a_wait_ends_for_another_and_who_computes_does_not():
    """As a call without a key: it may be ended as a whole, and while it waits for a message."""
    bound = Bound(1)

    async def inner():
        await first.within(inf, asyncio.sleep(600))

    first, second, third = (bound.inside(0) for _ in range(3))
    first.take(1)
    waiting = asyncio.ensure_future(first.within(inf, inner()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.take(1)
    with pytest.raises(Overloaded):
        await waiting
    with pytest.raises(Overloaded):
        third.take(1)
    assert (bound.units, first.units, second.units) == (1, 0, 1)
    second.leave()
    second.leave()
    assert bound.units == 0


async def test_a_wait_that_has_just_expired_gives_its_place_to_another():
    """Its task has not run since."""
    bound = Bound(1)
    first, second = bound.inside(0), bound.inside(0)
    first.take(1)
    waiting = asyncio.ensure_future(first.within(600, asyncio.sleep(600)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.expire(0)
    # The timer comes before this task, and what it cancels after it
    await asyncio.sleep(0)
    assert first.wait.expired()
    second.take(1)
    with pytest.raises(Overloaded):
        await waiting
    assert bound.units == 1


async def test_a_hurried_bound_waits_for_no_client_longer_than_it_is_told():
    bound = Bound(2)
    first, second = bound.inside(0), bound.inside(0)
    waiting = asyncio.ensure_future(first.within(600, asyncio.sleep(600)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bound.hurry(0.01)
    with pytest.raises(TimeoutError):
        await waiting
    with pytest.raises(TimeoutError):
        await second.within(600, asyncio.sleep(600))
    assert not bound.waiting


@given(st.integers(1, 20), st.lists(st.integers(1, 20)))
def test_permits_are_never_negative_and_all_come_back(permits, requests):
    admission = Bound(permits)
    for inputs in requests:
        if inputs > permits:
            with pytest.raises(Overloaded), admission.inside(inputs):
                pass
        else:
            with admission.inside(inputs):
                assert admission.free == permits - inputs
        assert admission.free == permits


def test_they_come_back_from_a_failure():
    admission = Bound(3)

    def fail():
        with admission.inside(3):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert admission.free == 3


def test_a_full_house_takes_nothing():
    admission = Bound(4)
    with admission.inside(3):
        with pytest.raises(Overloaded, match=r"^Model is overloaded$"), admission.inside(2):
            pass
        assert admission.free == 1


def test_large_ones_leave_a_quarter_to_small_ones():
    admission = Bound(16)
    with ExitStack() as inside:
        for _ in range(3):
            inside.enter_context(admission.inside(4, is_large=True))
        with pytest.raises(Overloaded), admission.inside(1, is_large=True):
            raise AssertionError
        for _ in range(4):
            inside.enter_context(admission.inside(1))
        with pytest.raises(Overloaded), admission.inside(1):
            raise AssertionError
    assert admission.free == 16


@given(st.integers(1, 1000))
def test_a_house_of_any_size_lets_large_ones_in(permits):
    admission, most = Bound(permits), most_of_large(permits)
    with admission.inside(most, is_large=True):
        assert 0 <= admission.free == permits - most
    assert admission.free == permits


async def test_carried_permits_serve_in_tasks_too_and_nowhere_else():
    admission = Bound(1)

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
