"""A bound of time that many share: who is late is told so, who is in time is not, and who leaves has left."""

from __future__ import annotations

import asyncio

import pytest

from hybridtei.engine.deadlines import Deadlines
from hybridtei.errors import TimedOut

SOON, HANG = 0.05, 30


async def never() -> None:
    await asyncio.Event().wait()


async def at_once(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_who_is_late_is_told_so_and_others_go_on():
    async def scenario() -> None:
        deadlines = Deadlines(SOON)
        late = [asyncio.create_task(deadlines.within(never())) for _ in range(5)]
        assert [await deadlines.within(at_once(i)) for i in range(5)] == [*range(5)]
        for each in late:
            with pytest.raises(TimedOut, match=r"within 0\.05 seconds \(request-timeout\)"):
                await each
            assert not each.cancelled()
        again = asyncio.create_task(deadlines.within(never()))
        with pytest.raises(TimedOut):
            await again
        assert await deadlines.within(at_once(1)) == 1

    asyncio.run(asyncio.wait_for(scenario(), HANG))


def test_what_goes_on_after_its_bound_is_not_cancelled_again():
    async def scenario() -> None:
        async def patient() -> str:
            try:
                await Deadlines(SOON).within(never())
            except TimedOut:
                await asyncio.sleep(2 * SOON)
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling() == 0
            return "went on"

        assert await asyncio.create_task(patient()) == "went on"

    asyncio.run(asyncio.wait_for(scenario(), HANG))


def test_who_is_cancelled_is_cancelled_also_when_late():
    async def scenario() -> None:
        deadlines = Deadlines(SOON)
        leaving = asyncio.create_task(deadlines.within(never()))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

        async def slow_to_end() -> None:
            try:
                await never()
            except asyncio.CancelledError:
                entered.set()
                await asyncio.sleep(HANG)

        entered = asyncio.Event()
        both = asyncio.create_task(deadlines.within(slow_to_end()))
        await entered.wait()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(asyncio.wait_for(scenario(), HANG))


def test_what_the_work_raises_is_what_is_raised():
    async def scenario() -> None:
        async def fails() -> None:
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            await Deadlines(HANG).within(fails())
        assert await Deadlines(0).within(at_once(3)) == 3
        deadlines = Deadlines(SOON)
        left = asyncio.create_task(deadlines.within(never()))
        await asyncio.sleep(0)
        deadlines.close()
        await asyncio.sleep(2 * SOON)
        assert not left.done()
        left.cancel()

    asyncio.run(asyncio.wait_for(scenario(), HANG))
