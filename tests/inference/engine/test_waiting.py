"""Laws of waiting for permits."""

import asyncio

import pytest

from hybridtei.errors import Overloaded
from hybridtei.inference.engine.admission import SHARE_LEFT, Admission


async def turn() -> None:
    """Let everybody take a step."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_waits_comes_in_when_others_leave_in_order():
    async def scene() -> list[str]:
        admission, came = Admission(2), []

        async def come(name: str, inputs: int) -> None:
            async with admission.held(inputs):
                came.append(name)

        with admission.inside(2):
            tasks = [
                asyncio.ensure_future(come(name, inputs))
                for name, inputs in (("a", 1), ("b", 2), ("c", 1))
            ]
            await turn()
            assert (came, admission.free, admission.waiting) == ([], 0, 3)
            with pytest.raises(Overloaded), admission.inside(1):
                pass
        await asyncio.gather(*tasks)
        assert (admission.free, admission.waiting) == (2, 0)
        return came

    assert asyncio.run(scene()) == ["a", "b", "c"]


def test_who_waits_leaves_some_to_those_who_cannot():
    async def scene() -> None:
        admission = Admission(4 * SHARE_LEFT)
        held = [await admission.wait(1) for _ in range(4 * SHARE_LEFT - 4)]
        waiting = asyncio.ensure_future(admission.wait(1))
        await turn()
        assert not waiting.done()
        with admission.inside(4):
            assert admission.free == 0
        admission.give_back(sum(held))
        assert await waiting == 1

    asyncio.run(scene())


def test_more_than_there_are_is_as_many_as_there_may_be():
    async def scene() -> None:
        admission = Admission(16)
        assert await admission.wait(1000) == 12
        assert admission.free == 4

    asyncio.run(scene())


def test_whoever_wants_many_is_not_passed_by():
    async def scene() -> None:
        admission = Admission(3)
        for _ in range(3):
            await admission.wait(1)
        many, one = (
            asyncio.ensure_future(admission.wait(3)),
            asyncio.ensure_future(admission.wait(1)),
        )
        await turn()
        for _ in range(2):
            admission.give_back(1)
            await turn()
            assert not many.done()
            assert not one.done()
        admission.give_back(1)
        await turn()
        assert many.done()
        assert not one.done()
        admission.give_back(1)
        assert await one == 1

    asyncio.run(scene())


@pytest.mark.parametrize("moment", ["before", "half served", "served"])
def test_who_is_cancelled_keeps_nothing(moment):
    async def scene() -> None:
        admission = Admission(2)
        await admission.wait(2)
        leaving, next_one = (
            asyncio.ensure_future(admission.wait(2)),
            asyncio.ensure_future(admission.wait(1)),
        )
        await turn()
        admission.give_back({"before": 0, "half served": 1, "served": 2}[moment])
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        admission.give_back({"before": 2, "half served": 1, "served": 0}[moment])
        assert await next_one == 1
        assert (admission.free, admission.waiting) == (1, 0)

    asyncio.run(scene())


def test_carried_permits_serve_in_tasks_too_and_nowhere_else():
    async def scene() -> None:
        admission = Admission(1)

        async def enter(inputs: int) -> None:
            with admission.inside(inputs):
                await asyncio.sleep(0)

        async with admission.held(1):
            await enter(1)
            await asyncio.gather(enter(1), enter(1))
            with pytest.raises(Overloaded):
                await enter(2)
        with admission.inside(1), pytest.raises(Overloaded):
            await enter(1)
        with admission.carrying(2):
            await enter(2)

    asyncio.run(scene())
