"""An engine asked over a socket answers as the engine itself: outputs, errors, leaving, and an engine that goes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from hybridtei import errors
from hybridtei.backends.fake import FakeBackend
from hybridtei.batch import Encoding, Head, PackedBatch, Positions
from hybridtei.engine.core import EngineCore
from hybridtei.engine.device import Device
from hybridtei.engine.engine import Engine
from hybridtei.engine.remote import EngineServer, FailedMessage, RemoteBackend, RemoteEngine
from hybridtei.errors import BackendError, HybridTeiError, Unhealthy
from hybridtei.observability.metrics import Registry
from hybridtei.system.machine import LaneKind
from tests.engine import small
from tests.engine.test_frames import same_columns

HANG = 120
SPEC = small.model_spec()
DENSE = frozenset({Head.DENSE})


def encodings(count: int, length: int = 10) -> list[Encoding]:
    return [Encoding(np.array([i % 70, i // 70, *range(length - 2)], dtype=np.int64)) for i in range(count)]


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, HANG))


@asynccontextmanager
async def engine(max_tokens: int = 40, **backend: Any) -> AsyncIterator[Engine]:
    device = Device([LaneKind.BULK])
    local = Engine(EngineCore(max_tokens=max_tokens, positions=Positions()), FakeBackend(SPEC, **backend), device, Registry())
    await local.start()
    device.start()
    yield local
    await local.stop()
    device.stop()


@asynccontextmanager
async def asked(local: Engine) -> AsyncIterator[tuple[RemoteEngine, EngineServer]]:
    here, there = socket.socketpair()
    server, remote = EngineServer(local), RemoteEngine(there)
    await server.open(here)
    await remote.start()
    yield remote, server
    await remote.stop()
    server.close()
    while server._channel._transport is not None or remote._channel._transport is not None:
        await asyncio.sleep(0)


def test_answers_are_the_engines_own_whoever_asks():
    async def scenario() -> None:
        async with engine() as local, asked(local) as (one, _), asked(local) as (other, _):
            requests = [(encodings(1 + i % 7, 2 + i % 30), frozenset([*SPEC.heads][: 1 + i % 4])) for i in range(200)]
            found = await asyncio.gather(*((one, other)[i % 2].run(*each, 0) for i, each in enumerate(requests)))
            for (given, heads), request in zip(requests, found, strict=True):
                again = await local.run(given, heads, 0)
                assert same_columns(request.outputs().only(heads), again.outputs().only(heads))
                assert request.timings().queue_ns > 0

    run(scenario())


def test_answers_larger_than_any_buffer():
    async def scenario() -> None:
        async with engine(max_tokens=4000) as local, asked(local) as (remote, _):
            given = encodings(1500, 30)
            large, small_one = await asyncio.gather(
                remote.run(given, frozenset(SPEC.heads), 0), remote.run(encodings(1), DENSE, 0)
            )
            again = await local.run(given, frozenset(SPEC.heads), 0)
            assert large.outputs().nbytes > 2_000_000
            assert same_columns(large.outputs(), again.outputs())
            assert small_one.outputs().dense is not None

    run(scenario())


def test_errors_keep_their_class_and_words():
    async def scenario() -> None:
        async with engine(fail_on=1) as local, asked(local) as (remote, _):
            with pytest.raises(BackendError, match="the batch holds the id 1"):
                await remote.run([Encoding(np.array([1]))], DENSE, 0)
            assert len((await remote.run([Encoding(np.array([2]))], DENSE, 0)).outputs().dense) == 1
            await remote.check_health()
        async with engine(fail_on=SPEC.positions.offset) as local, asked(local) as (remote, _):
            with pytest.raises(BackendError):
                await remote.run([Encoding(np.array([SPEC.positions.offset]))], DENSE, 0)
            with pytest.raises(Unhealthy):
                await remote.check_health()
            await local.stop()
            with pytest.raises(Unhealthy):
                await remote.run(encodings(1), DENSE, 0)

    run(scenario())


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HybridTeiError)]
ARGUMENTS: dict[type[HybridTeiError], tuple[Any, ...]] = {
    **dict.fromkeys((errors.OtherOrigin, errors.Overloaded, errors.Unhealthy), ()),
    errors.Ended: (None, "words"),
    errors.PartlyFailed: ("words", [], None),
    errors.RoleNeeded: ("admin", "name", ["embed"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_crosses(kind):
    error = kind(*ARGUMENTS.get(kind, ("words",)))
    back = FailedMessage.of(3, error).error()
    assert (type(back), str(back)) == (kind, str(error))


def test_errors_that_nobody_foresaw_are_the_backends():
    class Own(errors.InvalidInput):
        pass

    assert isinstance(FailedMessage.of(1, Own("words")).error(), errors.InvalidInput)
    assert str(FailedMessage.of(1, ValueError("words")).error()) == "ValueError: words"
    assert type(FailedMessage.of(1, ValueError("words")).error()) is BackendError


def test_who_leaves_takes_what_has_not_run_out_of_the_queue():
    async def scenario() -> None:
        holding, go = threading.Semaphore(0), threading.Event()

        def hold(_: PackedBatch) -> None:
            holding.release()
            assert go.wait(HANG)

        async with engine(gate=hold) as local, asked(local) as (remote, _), asked(local) as (dying, server):
            held = asyncio.create_task(remote.run(encodings(1), DENSE, 0))
            await asyncio.to_thread(holding.acquire)
            leaving = asyncio.create_task(remote.run(encodings(100), DENSE, 0))
            lost = asyncio.create_task(dying.run(encodings(70, 12), DENSE, 0))
            while local.metrics.queued.value() < 170:
                await asyncio.sleep(0.001)
            leaving.cancel()
            server.close()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            with pytest.raises(Unhealthy):
                await lost
            while local.metrics.dropped.value() < 2:
                await asyncio.sleep(0.001)
            go.set()
            assert len((await held).outputs().dense) == 1
            assert len((await remote.run(encodings(1, 5), DENSE, 0)).outputs().dense) == 1
            assert local._backend.forwards == 2

    run(scenario())


def test_an_engine_that_goes_fails_who_waits_and_who_comes():
    async def scenario() -> None:
        here, there = socket.socketpair()
        remote = RemoteEngine(there)
        await remote.start()
        waiting = [asyncio.create_task(remote.run(encodings(1), DENSE, 0)) for _ in range(5)]
        await asyncio.sleep(0)  # all of them are sent
        here.close()
        for each in [*waiting, remote.run(encodings(1), DENSE, 0), remote.check_health()]:
            with pytest.raises(Unhealthy):
                await each
        await remote.stop()

    run(scenario())


def test_a_far_backend_describes_and_does_nothing():
    far = RemoteBackend(SPEC, "fake", "float32", False, 256, (LaneKind.BULK,))
    with pytest.raises(BackendError, match="another process"):
        far.forward(None)  # type: ignore[arg-type]
