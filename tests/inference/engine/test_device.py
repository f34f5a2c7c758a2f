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
        held = asyncio.create_task(holder.run(encodings(1, 10), DENSE, 0))
        await gate.someone_waits()
        long = asyncio.create_task(first.run(encodings(60, 20), DENSE, 0))
        short = asyncio.create_task(second.run(encodings(20, 20), DENSE, 0))
        while first.metrics.queued.value() < 60 or second.metrics.queued.value() < 20:
            await asyncio.sleep(0.001)
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
        both = asyncio.gather(
            late.run(encodings(60, 20), DENSE, 0), busy.run(encodings(60, 20, 300), DENSE, 0)
        )
        await both
        # It does not wait for 200 texts of the other
        assert "busy" in order[:25]


async def test_a_model_that_leaves_fails_its_own_and_waits_for_what_runs():
    gate = Held()
    device = Device([LaneKind.BULK, LaneKind.BULK])
    leaving, staying = new_engine(device, gate=gate), new_engine(device)
    await leaving.start()
    await staying.start()
    device.start()
    running = asyncio.create_task(leaving.run(encodings(1, 10), DENSE, 0))
    await gate.someone_waits()
    going = asyncio.create_task(leaving.stop())
    await asyncio.sleep(0)
    assert len((await staying.run(encodings(3, 10), DENSE, 0)).outputs().dense) == 3
    assert not going.done()
    with pytest.raises(Unhealthy):
        await leaving.run(encodings(1, 5), DENSE, 0)
    gate.open()
    await going
    assert len((await running).outputs().dense) == 1
    newcomer = new_engine(device)
    await newcomer.start()
    assert len((await newcomer.run(encodings(2, 10), DENSE, 0)).outputs().dense) == 2
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
        assert len((await good.run([Encoding(np.array([1]))], DENSE, 0)).outputs().dense) == 1
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
        first = asyncio.create_task(one.run(encodings(1, 5), DENSE, 0))
        await gate.someone_waits()
        others = [
            asyncio.create_task(one.run(encodings(1, 5, number), DENSE, 0))
            for number in range(1, 6)
        ]
        while one.metrics.queued.value() < len(others):
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(first, *others)
    assert woken == [1, len(others)]
