"""Every sequence gets its outputs, however many threads compute them; what fails, fails all at
once."""

import asyncio
import threading

import numpy as np
import pytest

from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import Encoding, Head, Padding
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import BackendError
from hybridtei.inference.engine.core import EngineCore
from hybridtei.inference.engine.device import Device, run_all
from hybridtei.inference.engine.service import Engine
from hybridtei.system.machine import LaneKind, both_lanes
from hybridtei.system.metrics import Registry
from tests.inference.engine import small
from tests.inference.engine.test_device import on_device
from tests.near import same

HEADS = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})


def queued(backend, count, callers, max_tokens=64):
    core = EngineCore(
        max_tokens=max_tokens,
        positions=backend.spec.positions,
        padding=Padding.ALL,
        lanes=(LaneKind.BULK,) * callers,
    )
    draw = np.random.default_rng(count)
    return core, core.add(drawn(draw, count), HEADS)


def drawn(draw, count):
    return [Encoding(draw.integers(5, 20, size=draw.integers(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("lanes", [(LaneKind.BULK,), both_lanes(2)])
async def test_many_requests_at_once_are_answered_as_by_the_plain_loop(
    lanes,
):
    """`run_all` takes one request after the other; the engine has lanes, threads and an event
    loop."""
    draw, spec = np.random.default_rng(0), small.model_spec()
    requests = [drawn(draw, draw.integers(1, 9)) for _ in range(60)]
    device = Device(lanes)
    core = EngineCore(
        max_tokens=64, positions=spec.positions, padding=Padding.ATTENTION, lanes=lanes
    )
    engine = Engine(core, FakeBackend(spec), device, Registry())
    async with on_device(device, engine):
        answered = await asyncio.gather(
            *(engine.run(encodings, HEADS, 0) for encodings in requests)
        )
    for encodings, ours in zip(requests, answered, strict=True):
        plain = EngineCore(max_tokens=64, positions=spec.positions)
        expected = plain.add(encodings, HEADS)
        run_all(plain, FakeBackend(spec), 1, lambda done: None)
        for name in ("dense", "token_weights", "multivector"):
            mine, theirs = getattr(ours.outputs(), name), getattr(expected.outputs(), name)
            if name != "dense":
                same(mine.offsets, theirs.offsets)
                mine, theirs = mine.values, theirs.values
            same(mine, theirs)


def test_several_compute_at_once_what_one_computes():
    met = threading.Barrier(2, timeout=120)

    class Meeting(FakeBackend):
        def forward(self, batch, *, use_all_cores=False):
            if self.forwards == 0:
                # For the other one's first pass
                met.wait()
            return super().forward(batch)

    plain, backend = FakeBackend(small.model_spec()), Meeting(small.model_spec())
    alone, expected = queued(plain, 100, 1)
    run_all(alone, plain, 1, lambda done: None)
    core, request = queued(backend, 100, 2)
    done = []
    run_all(core, backend, 2, done.append)
    same(request.outputs().dense, expected.outputs().dense)
    assert len(core) == core.running == 0
    # Equal ones are computed once
    assert 0 < sum(done) <= 100


def test_a_failure_ends_all_and_is_raised():
    class Failing(FakeBackend):
        def forward(self, batch, *, use_all_cores=False):
            if self.forwards > 3:
                self.count()
                raise BackendError("no memory")
            return super().forward(batch)

    backend = Failing(small.model_spec())
    core, request = queued(backend, 200, 2)
    with pytest.raises(BackendError, match="no memory"):
        run_all(core, backend, 2, lambda done: None)
    # Each lane may have begun one more
    assert backend.forwards <= 6
    assert not request.done


def test_an_encoder_has_two_passes_under_way_where_launching_and_waiting_are_two_things():
    met = threading.Barrier(2, timeout=120)
    backend = FakeBackend(small.model_spec(), gate=lambda batch: met.wait())
    backend.fills_cores, backend.ahead = True, 1
    encoder = Encoder(small.model(), backend, 8, EngineConfig())
    texts = ["one", "two", "three", "four", "five six", "seven", "one two three"]
    found = encoder.encode(texts).dense
    # In pairs
    assert backend.forwards == 4
    plain = Encoder(small.model(), FakeBackend(small.model_spec()), 8, EngineConfig())
    same(found, plain.encode(texts).dense)
