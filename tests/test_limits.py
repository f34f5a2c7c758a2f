"""A bound counts what all hold; large holders leave a share, and who has held most for longest ends."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.limits import AtBound, Bound


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40))
def test_what_is_held_is_what_was_taken_and_not_given_back(steps):
    bound, held = Bound(100, small=20), []
    for takes, units in steps:
        if takes:
            limit = 100 if units <= 20 else 75
            fits = units == 0 or not bound.units or bound.units + units <= limit
            assert bound.has_room(units) == fits
            if fits:
                bound.take(units)
                held.append(units)
            else:
                with pytest.raises(AtBound):
                    bound.take(units)
        elif held:
            bound.give_back(held.pop())
        assert bound.units == sum(held)


async def test_the_holder_of_most_for_longest_ends():
    now = [0.0]
    bound = Bound(100, clock=lambda: now[0])
    ended = []

    async def hold(name, units, release):
        try:
            async with asyncio.timeout(None) as wait:
                with bound.arriving(wait) as holder:
                    holder.take(units)
                    await release.wait()
        except TimeoutError:
            ended.append(name)
        except AtBound:
            ended.append(f"{name} itself")

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


async def test_a_holder_that_asks_for_more_than_there_is_ends_itself():
    bound = Bound(100)
    bound.take(50)
    async with asyncio.timeout(None) as wait:
        with bound.arriving(wait) as holder, pytest.raises(AtBound):
            holder.take(60)
    assert bound.units == 50
