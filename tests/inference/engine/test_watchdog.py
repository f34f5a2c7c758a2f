"""A pass that takes longer than it may: its callers are told, health is down while it runs, and
comes back with it."""

import asyncio
import threading

import pytest

from hybridtei.errors import PassOverdue, Unhealthy
from hybridtei.inference.engine.device import Device, Watchdog
from hybridtei.system.machine import LaneKind
from tests.inference.engine.clock import Clock
from tests.inference.engine.test_device import (
    HANG,
    answers,
    ask,
    new_engine,
    on_device,
)

# The bound of a pass, on a clock that tests move: none is overdue because the machine is slow
SOON = 0.05


class Stuck:
    """A gate that a first pass does not come through until it is let go."""

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, _):
        if not self.entered.is_set():
            self.entered.set()
            assert self.go.wait(HANG)


def test_what_ends_in_time_is_never_called_and_what_does_not_is_called_once():
    calls = []
    called = threading.Event()
    clock = Clock()
    watchdog = Watchdog(SOON, clock=clock)
    watchdog.start()
    ended = watchdog.begin(lambda: calls.append("ended"))
    watchdog.end(ended)
    late = watchdog.begin(lambda: (calls.append("late"), called.set()))
    clock.now += SOON / 2
    in_time = watchdog.begin(lambda: calls.append("in time"))
    clock.now += SOON / 2
    assert called.wait(HANG)
    watchdog.end(late)
    watchdog.end(in_time)
    again = threading.Event()
    watchdog.begin(again.set)
    clock.now += SOON
    assert again.wait(HANG)
    assert calls == ["late"]
    watchdog.stop()


def test_without_a_bound_nobody_watches():
    before = threading.active_count()
    watchdog = Watchdog(0)
    watchdog.start()
    watchdog.end(watchdog.begin(lambda: None))
    assert threading.active_count() == before
    watchdog.stop()


def scene(lanes):
    stuck, clock = Stuck(), Clock()
    device = Device([LaneKind.BULK] * lanes, pass_timeout=SOON, clock=clock)
    return device, stuck, new_engine(device, gate=stuck), clock


async def overdue(stuck, clock):
    """The time of the pass at the gate runs out."""
    assert await asyncio.to_thread(stuck.entered.wait, HANG)
    clock.now += SOON


async def test_the_riders_of_a_stuck_pass_are_told_what_it_does_and_health_is_down_until_it_returns(
    caplog,
):
    device, stuck, engine, clock = scene(lanes=2)
    async with on_device(device, engine):
        first = ask(engine, 3, 10)
        await overdue(stuck, clock)
        with pytest.raises(PassOverdue) as told:
            await first
        for word in (
            "a pass of 3 inputs, 30 tokens, the longest 10, for dense, on fake in float32",
            "pass-timeout",
        ):
            assert word in str(told.value)
        assert [record.levelname for record in caplog.records] == ["CRITICAL"]
        with pytest.raises(Unhealthy):
            await engine.check_health()
        # The other lane goes on
        await answers(engine, 2, 5)
        with pytest.raises(Unhealthy):
            await engine.check_health()
        stuck.go.set()
        while device.overdue:
            await asyncio.sleep(0.001)
        await engine.check_health()
        assert "has ended" in caplog.records[-1].getMessage()
    assert not device.alive


async def test_while_every_lane_is_stuck_nobody_is_let_wait():
    device, stuck, engine, clock = scene(lanes=1)
    other = new_engine(device)
    async with on_device(device, engine, other):
        first = ask(engine, 1, 10)
        await asyncio.to_thread(stuck.entered.wait, HANG)
        waiting = [ask(one, 1, 10, 300) for one in (engine, other)]
        # Both wait
        await asyncio.sleep(0)
        await overdue(stuck, clock)
        for each in (first, *waiting):
            with pytest.raises(PassOverdue):
                await each
        for one in (engine, other):
            with pytest.raises(Unhealthy):
                await ask(one, 1, 5)
        stuck.go.set()
        while device.stuck:
            await asyncio.sleep(0.001)
        for one in (engine, other):
            await answers(one, 1, 5)
            await one.check_health()


async def test_a_pass_that_never_ends_does_not_keep_the_server_from_ending():
    device, stuck, engine, clock = scene(lanes=2)
    async with on_device(device, engine):
        first = ask(engine, 1, 10)
        await overdue(stuck, clock)
        with pytest.raises(PassOverdue):
            await first
    # And yet it has stopped
    assert device.overdue == 1
    stuck.go.set()


async def test_a_failure_that_comes_too_late_is_nobodys():
    device, stuck, _, clock = scene(lanes=1)

    def fail_late(batch):
        if not stuck.go.is_set():
            stuck(batch)
            raise RuntimeError("too late")

    engine = new_engine(device, gate=fail_late)
    async with on_device(device, engine):
        first = ask(engine, 1, 10)
        await overdue(stuck, clock)
        with pytest.raises(PassOverdue):
            await first
        stuck.go.set()
        while device.overdue:
            await asyncio.sleep(0.001)
        await answers(engine, 1, 5)
        await engine.check_health()
