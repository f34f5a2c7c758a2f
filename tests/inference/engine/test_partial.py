"""A backend that can compute only some of a batch, and one that takes batches ahead of its
lanes."""

import asyncio
import threading

import numpy as np
import pytest

from conformance.small.fake_backend import FakeBackend, Held
from hybridtei.batch import Encoding, Head, Positions, pack
from hybridtei.errors import BackendError
from hybridtei.inference.backends.torch.memory import TooLarge, split_on_oom
from hybridtei.inference.engine.core import EngineCore
from hybridtei.inference.engine.device import Device
from hybridtei.inference.engine.service import Engine
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import Registry
from tests.inference.engine import small
from tests.inference.engine.test_device import on_device, queued
from tests.near import same

DENSE = frozenset({Head.DENSE})
SPEC = small.model_spec()


class Narrow(FakeBackend):
    """Has room for 20 tokens a pass."""

    def forward(self, batch, *, use_all_cores=False):
        if self.gate is not None:
            self.gate(batch)
        return split_on_oom(self._room, batch, lambda: None)

    def _room(self, batch):
        if len(batch.input_ids) > 20:
            raise TooLarge("20 tokens is all there is")
        return FakeBackend(SPEC).forward(batch)


class Ahead(FakeBackend):
    ahead = 1


def encoding(length, first=0):
    return Encoding(np.array([first, *range(length - 1)], dtype=np.int64))


def new_engine(device, backend, max_tokens=1000):
    return Engine(
        EngineCore(max_tokens=max_tokens, positions=Positions()), backend, device, Registry()
    )


def ask(engine, *encodings):
    return asyncio.create_task(engine.run([*encodings], DENSE, 0))


async def test_only_the_requests_that_do_not_fit_fail():
    gate = Held()
    device = Device([LaneKind.BULK])
    rides = new_engine(device, Narrow(SPEC, gate=gate))
    async with on_device(device, rides):
        first = ask(rides, encoding(2))
        await gate.someone_waits()
        small_ones = [ask(rides, encoding(8, i), encoding(9, i)) for i in range(1, 4)]
        large = ask(rides, encoding(5, 7), encoding(30, 7))
        await queued(rides, 8)
        gate.open()
        await first
        for i, one in enumerate(small_ones, start=1):
            # As if nobody else had been there
            alone = pack([encoding(8, i), encoding(9, i)], DENSE, Positions())
            same((await one).outputs().dense, FakeBackend(SPEC).forward(alone).dense)
        with pytest.raises(BackendError, match="a sequence of 30 tokens does not fit into memory"):
            await large
        await rides.check_health()
        assert len((await ask(rides, encoding(12, 9))).outputs().dense) == 1


@pytest.mark.parametrize("joins_first", [True, False])
async def test_a_batch_is_taken_while_another_runs_and_no_third(joins_first):
    gate = Held()
    device = Device([LaneKind.BULK])
    rides = new_engine(device, Ahead(SPEC, gate=gate), max_tokens=10)
    if not joins_first:
        device.start()
    async with on_device(device, rides):
        asked = [ask(rides, encoding(8, i)) for i in range(3)]
        await gate.someone_waits()
        await gate.someone_waits()
        await queued(rides, 1)
        assert not gate.entered.acquire(blocking=False)
        gate.open()
        await asyncio.gather(*asked)
    assert not device.alive


async def test_all_that_waits_goes_into_one_batch_though_two_may_be_under_way():
    """Lanes share out what waits; what is taken ahead does not halve the batches."""
    sizes = []
    device = Device([LaneKind.BULK])
    rides = new_engine(device, Ahead(SPEC, gate=lambda batch: sizes.append(len(batch.input_ids))))
    await rides.start()
    ride = ask(rides, *(encoding(50, i) for i in range(10)))
    await queued(rides, 10)
    device.start()
    await ride
    assert sizes == [500]
    await rides.stop()
    device.stop()


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_model_that_leaves_frees_its_weights_unless_a_pass_reads_them(is_running):
    closed = []

    class Closing(FakeBackend):
        def close(self):
            closed.append(True)

    gate = Held()
    device = Device([LaneKind.BULK])
    leaving, staying = new_engine(device, Closing(SPEC, gate=gate)), new_engine(device, Ahead(SPEC))
    async with on_device(device, staying):
        await leaving.start()
        if is_running:
            running = asyncio.create_task(leaving.run([encoding(2)], DENSE, 0))
            await gate.someone_waits()
        await leaving.stop(seconds=0.0)
        gate.open()
        if is_running:
            await running
    assert closed == [True] * (not is_running)


async def test_models_share_the_lanes_of_batches_ahead():
    device = Device([LaneKind.BULK])
    async with on_device(device, *(new_engine(device, Ahead(SPEC)) for _ in range(2))):
        names = [thread.name for thread in threading.enumerate()]
        assert sorted(name for name in names if name.startswith("ahead")) == ["ahead-1"]
