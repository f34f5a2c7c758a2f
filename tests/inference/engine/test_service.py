"""The engine under asyncio, with the fake backend as seam: whom a failure hits, what a cancelled
caller costs, how it ends."""

import asyncio
import itertools
import os
import threading
from contextlib import asynccontextmanager

import pytest

from conformance.small.fake_backend import FakeBackend, Held
from hybridtei.batch import Head, Padding
from hybridtei.config import EngineConfig
from hybridtei.errors import BackendError, EmptyInput, InvalidInput, Unhealthy
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.tasks.embed import Embed
from hybridtei.options import EmbedOptions
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import Registry
from tests.inference.engine import small
from tests.near import near, same
from tests.sampled import paired

# Seconds after which a test that should end at once has hung
HANG = 120
ALL = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR})


PAIRS = itertools.cycle(itertools.permutations(small.LETTERS[:36], 2))


class Switch:
    """Raises what it is told to, or nothing."""

    def __init__(self, error=None):
        self.error = error

    def __call__(self, _):
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def running(service):
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def embed(*texts, heads=frozenset({Head.DENSE}), **settings):
    return Embed(list(texts), heads, EmbedOptions(**settings))


def different(count):
    """Texts of four tokens each, no two alike: identical ones would wait as one."""
    return [f"{first} {second}" for first, second in itertools.islice(PAIRS, count)]


async def answer(service, task):
    return (await service.run(task)).answer


def asking(service, *texts):
    """A task that waits for the answer."""
    return asyncio.create_task(answer(service, embed(*texts)))


def all_free(service):
    return service.admission.free == service.config.max_concurrent_requests


def queued(service):
    return service.engine.metrics.queued.value()


async def test_an_answer_with_lengths_and_times():
    async with running(small.service()) as service:
        answered = await service.run(embed("a hybrid search", "one", heads=ALL))
        assert answered.lengths == [5, 3]
        assert answered.answer.dense.shape == (2, small.HIDDEN)
        assert answered.answer.multivector.lengths.tolist() == [4, 2]
        times = answered.timings
        assert min(times.tokenization_ns, times.queue_ns, times.inference_ns) > 0
        assert all_free(service)


async def test_one_request_of_many_batches_wakes_every_lane():
    gate = Held()
    async with running(small.service(lanes=3, gate=gate, budget_tokens=8)) as service:
        asked = asking(service, *different(12))
        # Three passes stand at the gate at once: nobody sleeps while there is work
        for _ in range(3):
            await gate.someone_waits()
        gate.open()
        assert len(await asked) == 12


@pytest.mark.parametrize(("padding", "lanes"), paired([*Padding], [1, 3]))
async def test_hybrid_requests_in_batches_cost_exactly_one_pass_a_batch(lanes, padding):
    seen = []
    registry = Registry()
    async with running(
        small.service(lanes=lanes, padding=padding, gate=seen.append, registry=registry)
    ) as service:
        texts = [
            " ".join([*small.WORDS[: 1 + i % 15], *text.split()])
            for i, text in enumerate(different(100))
        ]
        answers = await asyncio.gather(*(answer(service, embed(text, heads=ALL)) for text in texts))
        assert service.backend.forwards == len(seen) == service.engine.metrics.forwards.value()
        assert sum(len(batch) for batch in seen) == 100
        assert f"te_batch_next_size_count {len(seen)}" in registry.text().splitlines()
        assert len(seen) < 100
        for text, one in zip(texts, answers, strict=True):
            alone = await answer(service, embed(text, heads=ALL))
            near(one.dense, alone.dense, 1e-6)
            same(one.sparse.to_dense(), alone.sparse.to_dense())
            near(one.multivector.values, alone.multivector.values, 1e-6)


BOTH = (LaneKind.EXPRESS, LaneKind.BULK)
LONG = " ".join(["a"] * 50)


async def test_bulk_lanes_give_way_and_express_lanes_do_not():
    seen = {}

    def note(batch):
        seen[len(batch.input_ids)] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with running(
        small.service(lanes=BOTH, gate=note, config={"bulk_niceness": own + 4})
    ) as service:
        await answer(service, embed("one"))
        await answer(service, embed(LONG))
    assert seen == {3: own, 52: own + 4}


async def test_a_cache_answers_what_was_asked_before():
    registry = Registry()
    async with running(
        small.service(config={"embedding_cache_mb": 1}, registry=registry)
    ) as service:
        first = await answer(service, embed("one", "two", heads=ALL))
        again = await answer(service, embed("two", heads=ALL))
        assert service.backend.forwards == 1
    same(first.dense[1], again.dense[0])
    same(first.multivector.row(1), again.multivector.row(0))
    lines = registry.text().splitlines()
    assert {"hybridtei_cache_hits_total 1", "hybridtei_cache_misses_total 2"} <= set(lines)


async def test_no_batch_exceeds_its_budget_or_count():
    seen = []
    service = small.service(budget_tokens=40, config={"max_batch_requests": 4}, gate=seen.append)
    async with running(service):
        await asyncio.gather(*(answer(service, embed(*different(4))) for _ in range(20)))
    assert max(len(batch.input_ids) for batch in seen) <= 40
    assert max(len(batch) for batch in seen) == 4


async def test_what_is_damaged_is_unhealthy_before_any_pass_fails(monkeypatch):
    monkeypatch.setattr("hybridtei.inference.engine.service.DAMAGED", ["the weights"])
    switch = Switch()
    async with running(small.service(gate=switch)) as service:
        switch.error = BackendError("the weights")
        with pytest.raises(Unhealthy):
            await service.check_health()


async def test_health_flips_and_comes_back_by_a_one_token_probe():
    switch = Switch()
    async with running(small.service(gate=switch)) as service:
        await service.check_health()
        # Healthy until shown otherwise: no probe
        assert service.backend.forwards == 0
        switch.error = RuntimeError("gone")
        with pytest.raises(BackendError):
            await answer(service, embed("one"))
        for _ in range(2):
            with pytest.raises(Unhealthy, match=r"^unhealthy$"):
                await service.check_health()
        assert service.backend.forwards == 3
        switch.error = None
        await service.check_health()
        assert service.backend.forwards == 4
        switch.error = RuntimeError("once more")
        with pytest.raises(BackendError):
            await answer(service, embed("one"))
        switch.error = None
        # A good pass is as good as a probe
        await answer(service, embed("one"))
        await service.check_health()
        assert service.backend.forwards == 6


async def test_a_caller_cancelled_while_its_pass_runs_harms_nobody():
    gate = Held()
    async with running(small.service(gate=gate)) as service:
        going = asking(service, "one")
        await gate.someone_waits()
        staying = asking(service, "two")
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        gate.open()
        assert len((await staying).dense) == 1
        assert all_free(service)


REFUSED = [
    (embed(""), EmptyInput),
    (embed([]), EmptyInput),
    (embed("one", dimensions=0), InvalidInput),
    (embed("a " * 100, truncate=False), InvalidInput),
    (embed("one", prompt_name="nobody"), InvalidInput),
    (embed([len(small.PIECES)]), InvalidInput),
]


async def test_what_is_refused_gives_its_permits_back():
    async with running(small.service()) as service:
        for task, error in REFUSED:
            with pytest.raises(error):
                await answer(service, task)
            assert all_free(service)
        assert service.backend.forwards == 0


async def test_stop_fails_who_waits_finishes_who_runs_and_ends_the_lanes():
    before = set(threading.enumerate())
    gate = Held()
    service = small.service(gate=gate)
    with pytest.raises(Unhealthy):
        await service.check_health()
    await service.start()
    running_one = asking(service, "one")
    await gate.someone_waits()
    waiting = [asking(service, *different(1)) for _ in range(5)]
    while queued(service) < 5:
        await asyncio.sleep(0.001)
    stopping = asyncio.create_task(service.stop())
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, Unhealthy) for result in results)
    gate.open()
    await stopping
    assert len((await running_one).dense) == 1
    assert not [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(("express", "bulk"))
    ]
    with pytest.raises(Unhealthy):
        await service.check_health()
    with pytest.raises(Unhealthy):
        await answer(service, embed("late"))
    assert all_free(service)


class Slow(Embed):
    """Tokenises only when told to."""

    __slots__ = ("go",)

    def prepare(self, model):
        assert self.go.wait(HANG)
        return super().prepare(model)


async def test_stop_refuses_what_is_still_being_tokenised():
    service = small.service(config={"tokenization_workers": 1})
    await service.start()
    go, tasks = threading.Event(), []
    # One holds the only worker, two wait for it
    for _ in range(3):
        task = Slow(["one"], frozenset({Head.DENSE}))
        object.__setattr__(task, "go", go)
        tasks.append(asyncio.create_task(answer(service, task)))
    await asyncio.sleep(0)
    await service.stop()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, Unhealthy) for result in results)
    assert all_free(service)


class Homeless(FakeBackend):
    """Its lanes cannot even begin."""

    def enter_lane(self, kind):
        raise OSError("no device")


async def test_a_lane_that_cannot_begin_is_unhealthy():
    service = EngineService(
        small.model(), Homeless(small.model_spec(), lanes=2), EngineConfig(), budget_tokens=64
    )
    async with running(service):
        with pytest.raises((BackendError, Unhealthy)):
            await answer(service, embed("one"))
        with pytest.raises(Unhealthy):
            await service.check_health()
