"""A bound of time that many share: who is late is told so, who is in time is not, and who leaves
has left."""

import asyncio
from typing import TypeVar

import pytest

from hybridtei.errors import TimedOut
from hybridtei.limits import Deadlines
from tests.inference.engine.clock import Clock

T = TypeVar("T")
# A bound; seconds after which a test that should end at once has hung
SOON, HANG = 0.01, 120


async def within(deadlines, work):
    with deadlines.within():
        return await work


async def never():
    await asyncio.Event().wait()


async def at_once(value):
    await asyncio.sleep(0)
    return value


async def until_late(deadlines, clock):
    """Begins something, and returns once it was found late."""
    late = asyncio.create_task(within(deadlines, never()))
    await asyncio.sleep(0)
    clock.now += SOON
    with pytest.raises(TimedOut):
        await late


async def test_who_is_late_is_told_so_and_others_go_on():
    clock = Clock()
    deadlines = Deadlines(SOON, clock=clock)
    late = [asyncio.create_task(within(deadlines, never())) for _ in range(5)]
    assert [await within(deadlines, at_once(i)) for i in range(5)] == [*range(5)]
    clock.now += SOON
    for each in late:
        with pytest.raises(TimedOut, match=r"within 0\.01 seconds \(request-timeout\)"):
            await each
        assert not each.cancelled()
    await until_late(deadlines, clock)
    assert await within(deadlines, at_once(1)) == 1


async def test_looks_before_the_bound_find_nobody_late():
    clock, looks = Clock(), 0
    looked = asyncio.Event()

    def counting():
        nonlocal looks
        looks += 1
        # The first was the beginning
        if looks > 3:
            looked.set()
        return clock.now

    deadlines = Deadlines(SOON, clock=counting)
    waiting = asyncio.create_task(within(deadlines, never()))
    await looked.wait()
    assert not waiting.done()
    clock.now = SOON
    with pytest.raises(TimedOut):
        await waiting


async def test_what_goes_on_after_its_bound_is_not_cancelled_again():
    clock = Clock()
    deadlines = Deadlines(SOON, clock=clock)

    async def patient():
        with pytest.raises(TimedOut):
            await within(deadlines, never())
        # Another look
        await until_late(deadlines, clock)
        task = asyncio.current_task()
        assert task.cancelling() == 0
        return "went on"

    going = asyncio.create_task(patient())
    await asyncio.sleep(0)
    clock.now += SOON
    assert await going == "went on"


async def test_who_is_cancelled_is_cancelled_also_when_late():
    clock = Clock()
    deadlines = Deadlines(SOON, clock=clock)
    leaving = asyncio.create_task(within(deadlines, never()))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving

    async def slow_to_end():
        try:
            await never()
        except asyncio.CancelledError:
            entered.set()
            await never()

    entered = asyncio.Event()
    both = asyncio.create_task(within(deadlines, slow_to_end()))
    await asyncio.sleep(0)
    clock.now += SOON
    await entered.wait()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both


async def test_what_the_work_raises_is_what_is_raised():
    async def fails():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await within(Deadlines(HANG), fails())
    assert await within(Deadlines(0), at_once(3)) == 3


async def test_once_closed_nobody_is_late():
    clock = Clock()
    deadlines = Deadlines(SOON, clock=clock)
    left = asyncio.create_task(within(deadlines, never()))
    await asyncio.sleep(0)
    deadlines.close()
    # Its timer comes after the other's would have
    await until_late(Deadlines(SOON, clock=clock), clock)
    assert not left.done()
    left.cancel()
