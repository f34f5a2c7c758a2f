"""Several models on one device: shared fairly by tokens, and none harmed by another's coming, going
or failing."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from conformance.small.fake_backend import FakeBackend, Held
from hybridtei.batch import Encoding, Head, Positions, pack
from hybridtei.errors import BackendError, Unhealthy
from hybridtei.inference.engine import core as core_module
from hybridtei.inference.engine import service as engine_module
from hybridtei.inference.engine.core import EngineCore
from hybridtei.inference.engine.device import Device
from hybridtei.inference.engine.service import Engine
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import Registry
from tests.inference.engine import small

HANG = 120
DENSE = frozenset({Head.DENSE})
SPEC = small.model_spec()


def encodings(count, length, first=0):
    return [
        Encoding(
            np.array([(first + i) % 70, (first + i) // 70, *range(length - 2)], dtype=np.int64)
        )
        for i in range(count)
    ]


def new_engine(device, **backend):
    core = EngineCore(max_tokens=40, positions=Positions())
    return Engine(core, FakeBackend(SPEC, **backend), device, Registry())


def ask(engine, count, length, first=0):
    """A task that waits for the answer to one request."""
    return asyncio.create_task(engine.run(encodings(count, length, first), DENSE, 0))


async def answers(engine, count, length):
    assert len((await ask(engine, count, length)).outputs().dense) == count


async def queued(engine, count):
    """Returns once so many inputs wait."""
    while engine.metrics.queued.value() < count:
        await asyncio.sleep(0.001)


@asynccontextmanager
async def on_device(device, *engines):
    """Engines at work. A test that fails leaves them so: a lane may be held for ever."""
    for one in engines:
        await one.start()
    device.start()
    yield
    for one in engines:
        await one.stop()
    await asyncio.to_thread(device.stop)


async def test_models_share_a_device_by_tokens():
    order = []
    gate = Held()
    device = Device([LaneKind.BULK])
    first = new_engine(device, gate=lambda batch: order.extend(["first"] * len(batch.input_ids)))
    second = new_engine(device, gate=lambda batch: order.extend(["second"] * len(batch.input_ids)))
    holder = new_engine(device, gate=gate)
    async with on_device(device, first, second, holder):
        held = ask(holder, 1, 10)
        await gate.someone_waits()
        long = ask(first, 60, 20)
        short = ask(second, 20, 20)
        await queued(first, 60)
        await queued(second, 20)
        gate.open()
        await asyncio.gather(held, long, short)
        # While both had work
        half = order[: order.index("second") + 800]
        assert abs(half.count("first") - half.count("second")) <= 80


async def test_an_idle_model_saves_nothing_up():
    order = []
    device = Device([LaneKind.BULK])
    busy, late = (
        new_engine(device, gate=lambda batch, name=name: order.append(name))
        for name in ("busy", "late")
    )
    async with on_device(device, busy, late):
        await busy.run(encodings(200, 20), DENSE, 0)
        order.clear()
        # Both wait before any lane looks
        with device.lock:
            pass
        await asyncio.gather(ask(late, 60, 20), ask(busy, 60, 20, 300))
        # It does not wait for 200 texts of the other
        assert "busy" in order[:25]


async def test_a_model_that_leaves_fails_its_own_and_waits_for_what_runs():
    gate = Held()
    device = Device([LaneKind.BULK, LaneKind.BULK])
    leaving, staying = new_engine(device, gate=gate), new_engine(device)
    await leaving.start()
    await staying.start()
    device.start()
    running = ask(leaving, 1, 10)
    await gate.someone_waits()
    going = asyncio.create_task(leaving.stop())
    await asyncio.sleep(0)
    await answers(staying, 3, 10)
    assert not going.done()
    with pytest.raises(Unhealthy):
        await leaving.run(encodings(1, 5), DENSE, 0)
    gate.open()
    await going
    assert len((await running).outputs().dense) == 1
    newcomer = new_engine(device)
    await newcomer.start()
    await answers(newcomer, 2, 10)
    for one in (staying, newcomer):
        await one.stop()
    device.stop()
    assert not device.alive


async def test_a_failing_model_leaves_the_others_healthy():
    device = Device([LaneKind.BULK])
    bad, good = new_engine(device, fail_on=1), new_engine(device)
    async with on_device(device, bad, good):
        with pytest.raises(BackendError):
            await bad.run([Encoding(np.array([1]))], DENSE, 0)
        await answers(good, 1, 2)
        await good.check_health()
        # A probe decides, and this one passes
        await bad.check_health()


async def test_a_batch_is_packed_while_others_may_queue(monkeypatch):
    device, held = Device([LaneKind.BULK]), []

    def seen(*arguments):
        held.append(device.lock.locked())
        return pack(*arguments)

    monkeypatch.setattr(core_module, "pack", seen)
    one = new_engine(device)
    async with on_device(device, one):
        await one.run(encodings(3, 10), DENSE, 0)
    assert held == [False]


async def test_the_event_loop_wakes_once_for_all_requests_that_a_pass_completes(monkeypatch):
    gate, device, woken = Held(), Device([LaneKind.BULK]), []
    loop = asyncio.get_running_loop()
    schedule = loop.call_soon_threadsafe

    def noting(callback, *arguments, **settings):
        if callback is engine_module._wake:
            woken.append(len(arguments[0]))
        return schedule(callback, *arguments, **settings)

    monkeypatch.setattr(loop, "call_soon_threadsafe", noting)
    one = new_engine(device, gate=gate)
    async with on_device(device, one):
        first = ask(one, 1, 5)
        await gate.someone_waits()
        others = [ask(one, 1, 5, number) for number in range(1, 6)]
        await queued(one, len(others))
        gate.open()
        await asyncio.gather(first, *others)
    assert woken == [1, len(others)]
