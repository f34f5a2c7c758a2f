"""The engine under asyncio: admission, a tokenizer pool, the backend's lanes (threads), one wake-up a batch.

Holds no policy: who is let in is `Admission`'s, who rides when is `EngineCore`'s. A failed pass fails its own riders; a lane
that dies of anything else fails every waiter and flips health.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import Generic, Protocol, TypeVar

import numpy as np

from hybridtei.backends.base import Backend
from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import EngineConfig, default_tokenization_workers
from hybridtei.engine.admission import Admission
from hybridtei.engine.core import Batch, EngineCore, Ticket
from hybridtei.errors import BackendError, Unhealthy
from hybridtei.metrics import Registry, powers_of_two
from hybridtei.outputs import HeadOutputs, Timings
from hybridtei.tasks.embed import Model

log = logging.getLogger(__name__)

SIDE_QUEUE = 64  # pieces of work without a pass (`/tokenize`, `/decode`) that may be inside at once

Answer_co = TypeVar("Answer_co", covariant=True)


class Task(Protocol[Answer_co]):
    """What a caller can ask; asking the same twice gives the same answer."""

    @property
    def heads(self) -> frozenset[Head]: ...

    def check(self, spec: ModelSpec) -> None: ...

    def prepare(self, model: Model) -> list[Encoding]: ...

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Answer_co: ...


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """A task's answer, how many tokens ran for it, and the times of each stage."""

    answer: T
    lengths: Sequence[int]
    timings: Timings


class BatchMetrics:
    """What is counted per batch, under TEI's names; and passes, under ours."""

    def __init__(self, registry: Registry) -> None:
        self.size = registry.histogram("te_batch_next_size", powers_of_two(4096))
        self.tokens = registry.histogram("te_batch_next_tokens", powers_of_two(1_048_576))
        self.queued = registry.gauge("te_queue_size")
        self.forwards = registry.counter("hybridtei_forward_passes")
        self.dropped = registry.counter("hybridtei_dropped_requests")  # whose caller left while they waited for a pass
        self.queued.set(0)


class EngineService:
    """One model, served to many callers on one event loop."""

    def __init__(
        self, model: Model, backend: Backend, config: EngineConfig, *, budget_tokens: int, registry: Registry | None = None
    ) -> None:
        self.model = model
        self.backend = backend
        self.config = config
        self.budget_tokens = budget_tokens
        self.workers = config.tokenization_workers or default_tokenization_workers()
        self.admission = Admission(config.max_concurrent_requests)
        self.metrics = BatchMetrics(registry or Registry())
        self._core = EngineCore(
            max_tokens=budget_tokens,
            max_sequences=config.max_batch_requests,
            positions=model.spec.positions,
            padded=backend.padded,
        )
        self._changed = threading.Condition()
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._closing = False
        self._healthy = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tokenize")
        self._side_pool = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._beside = Admission(SIDE_QUEUE)
        self._lanes = [threading.Thread(target=self._lane, name=f"lane-{i}", daemon=True) for i in range(backend.lanes)]

    async def start(self) -> None:
        """Start the lanes; futures will be resolved on the running loop."""
        self._loop = asyncio.get_running_loop()
        for lane in self._lanes:
            lane.start()

    async def stop(self) -> None:
        """Let running batches end, fail what still waits, and stop the lanes."""
        with self._changed:
            self._closing = True
            failed = self._core.fail_all(Unhealthy())
            self._changed.notify_all()
        self._wake(failed)
        for lane in self._lanes:
            if lane.is_alive():
                await asyncio.to_thread(lane.join)
        for pool in (self._pool, self._side_pool):
            pool.shutdown(wait=False)  # what it still holds ends there, and is refused at the queue
        self.backend.close()

    async def run(self, task: Task[T], *, inputs: int) -> Answered[T]:
        """Admit, tokenise, queue, wait, finish. `inputs` permits are held all the while.

        Raises Overloaded at once, RequestError for bad input, BackendError if the pass fails. Cancelling the caller frees
        the permits and takes what has not run out of the queue.
        """
        with self.admission.inside(inputs):
            task.check(self.model.spec)
            began = perf_counter_ns()
            encodings = await self._in(self._pool, partial(task.prepare, self.model))
            tokenised = perf_counter_ns()
            outputs, timings = await self._ride(encodings, task.heads, tokenised)
            answer = task.finish(self.model, encodings, outputs)
        timings = replace(timings, tokenization_ns=(tokenised - began) // max(inputs, 1))
        return Answered(answer, [len(encoding) for encoding in encodings], timings)

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work that needs no pass where it cannot hold up what does. Raises Overloaded if much waits there already."""
        with self._beside.inside(1):
            return await self._in(self._side_pool, work)

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """If the caller goes before the work began, it never runs. Raises Unhealthy."""
        if self._closing:
            raise Unhealthy
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def check_health(self) -> None:
        """Nothing, if the last pass went well; else one token decides. Raises Unhealthy."""
        if self._closing or not any(lane.is_alive() for lane in self._lanes):
            raise Unhealthy
        if self._healthy:
            return
        probe = Encoding(np.array([self.model.spec.positions.offset], dtype=np.int64))
        try:
            await self._ride([probe], frozenset({next(iter(sorted(self.model.spec.heads)))}), perf_counter_ns())
        except BackendError as error:
            raise Unhealthy from error

    async def _ride(self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int) -> tuple[HeadOutputs, Timings]:
        arrived = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closing:
                raise Unhealthy
            ticket = self._core.add(encodings, heads, now_ns)
            self.metrics.queued.set(len(self._core))
            self._changed.notify()
        self._waiters[ticket] = arrived
        try:
            await arrived
        except asyncio.CancelledError:
            ticket.cancelled = True
            self.metrics.dropped.add()
            raise
        finally:
            self._waiters.pop(ticket, None)
        return ticket.outputs(), ticket.timings()

    def _lane(self) -> None:
        try:
            self.backend.enter_lane()
            while (batch := self._next_batch()) is not None:
                self._finished(self._run_batch(batch))
        except BaseException as error:  # a defect of ours: nobody may wait for ever because of it
            log.critical("a lane died; every waiting request fails", exc_info=True)
            failure = BackendError(f"the engine stopped: {error}")
            with self._changed:
                self._healthy = False
                self._closing = True
                self._core.fail_all(failure)
                self._changed.notify_all()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._fail_waiters, failure)

    def _next_batch(self) -> Batch | None:
        """Waits for work; None when the service closes."""
        with self._changed:
            while True:
                batch = self._core.take(perf_counter_ns())
                self.metrics.queued.set(len(self._core))
                if batch is not None:
                    if len(self._core):  # one request may fill many batches: wake the next lane too
                        self._changed.notify()
                    return batch
                if self._closing:
                    return None
                self._changed.wait()

    def _run_batch(self, batch: Batch) -> list[Ticket]:
        self.metrics.size.observe(len(batch.packed))
        self.metrics.tokens.observe(len(batch.packed.input_ids))
        try:
            parts = batch.split(self.backend.forward(batch.packed))
            self.metrics.forwards.add()
        except Exception as error:  # whatever a backend raises is this batch's misfortune only
            log.error("a batch of %d failed: %s", len(batch.packed), error)
            failure = error if isinstance(error, BackendError) else BackendError(f"{type(error).__name__}: {error}")
            with self._changed:
                self._healthy = False
                return self._core.fail(batch, failure)
        with self._changed:
            self._healthy = True
            return self._core.settle(parts, perf_counter_ns() - batch.taken_ns)

    def _finished(self, tickets: list[Ticket]) -> None:
        if tickets and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, tickets)

    def _fail_waiters(self, error: BackendError) -> None:
        for ticket in self._waiters:
            ticket.error = error
        self._wake(list(self._waiters))

    def _wake(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            arrived = self._waiters.get(ticket)
            if arrived is not None and not arrived.done():
                arrived.set_result(None)
