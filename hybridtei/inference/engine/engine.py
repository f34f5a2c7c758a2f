"""Runs a model's queue: `Engine` for callers on an event loop, by a device's lanes; `run_all` for a caller that blocks.

`Engine` wakes its loop once a batch, for all requests that the batch completes. `run_all` starts threads that end with the
queue. The threads of one pass over all cores meet after each operation, which costs too much for short texts, so `run_all` runs
several passes of one thread each. A few short texts are the exception: they are one pass.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from hybridtei.batch import Encoding, Head
from hybridtei.errors import BackendError, Unhealthy
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.core import EngineBatch, EngineCore, ResultCache
from hybridtei.inference.engine.device import Device, ModelInstance
from hybridtei.inference.engine.scheduler import EngineRequest
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import Registry, powers_of_two


class BatchMetrics:
    """Counters of batches, under TEI's names, and of passes, lanes and saved work, under ours. `core`: the queue."""

    def __init__(
        self, registry: Registry, core: EngineCore, cache: ResultCache | None = None
    ) -> None:
        self._budget_tokens = core.max_tokens
        self.size = registry.histogram("te_batch_next_size", powers_of_two(4096))
        self.tokens = registry.histogram("te_batch_next_tokens", powers_of_two(1_048_576))
        self.forwards = registry.counter("hybridtei_forward_passes_total")
        batches, tokens = (
            registry.counter("hybridtei_lane_batches_total"),
            registry.counter("hybridtei_lane_tokens_total"),
        )
        self._of_lane = {kind: (batches.of(lane=kind), tokens.of(lane=kind)) for kind in LaneKind}
        self.fill = registry.histogram(
            "hybridtei_batch_fill", [tenths / 10 for tenths in range(1, 11)]
        )
        self.queued = registry.observed("te_queue_size", lambda: len(core))
        registry.observed("hybridtei_queue_tokens", lambda: core.waiting_tokens)
        registry.observed("hybridtei_running_batches", lambda: core.running)
        self.dropped = registry.counter(
            "hybridtei_dropped_requests_total"
        )  # requests cancelled while they waited for a pass
        registry.counted("hybridtei_shared_inputs_total", lambda: core.shared)
        registry.counted("hybridtei_cache_hits_total", lambda: 0 if cache is None else cache.hits)
        registry.counted(
            "hybridtei_cache_misses_total", lambda: 0 if cache is None else cache.misses
        )
        self.cache_bytes = registry.gauge("hybridtei_cache_bytes")

    def taken(self, batch: EngineBatch) -> None:
        """Count a batch that a lane takes."""
        tokens = batch.tokens
        batches, lane_tokens = self._of_lane[batch.kind]
        batches()
        lane_tokens(tokens)
        self.fill.observe(tokens / self._budget_tokens)
        self.size.observe(len(batch.rows))
        self.tokens.observe(tokens)


class EngineClient(Protocol):
    """Computes a service's encodings: in this process (`Engine`), or in another one (`engine_process.RemoteEngine`)."""

    async def start(self) -> None: ...

    @property
    def dead(self) -> BackendError | None: ...

    @property
    def busy(self) -> bool: ...

    async def stop(self, seconds: float | None = None) -> None: ...

    async def run(
        self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int
    ) -> EngineRequest: ...

    async def check_health(self) -> None: ...


class Engine:
    """One model's queue on a device, awaited on one event loop."""

    def __init__(
        self,
        core: EngineCore,
        backend: Backend,
        device: Device,
        registry: Registry,
        cache: ResultCache | None = None,
    ) -> None:
        self.metrics = BatchMetrics(registry, core, cache)
        self._core = core
        self._cache = cache
        self._backend = backend
        self._device = device
        self._instance = ModelInstance(
            core, backend, self.metrics.taken, self._on_complete, self._on_death
        )
        self._open: set[EngineRequest] = set()  # requests with waiting callers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False

    async def start(self) -> None:
        """Join the device. Futures are resolved on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._device.join(self._instance)

    @property
    def dead(self) -> BackendError | None:
        """The error that ended the lanes, or None."""
        return self._device.dead

    @property
    def busy(self) -> bool:
        """True if a pass of the model runs."""
        return self._instance.running > 0

    async def stop(self, seconds: float | None = None) -> None:
        """Fail waiting requests, and wait at most `seconds` for running batches."""
        with self._device.lock:
            self._closing = True
            failed = self._core.fail_all(Unhealthy())
        _wake(failed)
        await asyncio.to_thread(self._device.leave, self._instance, seconds)
        if not self.busy:  # a pass that does not end still needs the weights
            self._backend.close()

    async def run(
        self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int
    ) -> EngineRequest:
        """Queue a request, and return it with all outputs. Raises BackendError if a pass fails, and Unhealthy when closing.

        Cancelling the caller removes its waiting sequences from the queue.
        """
        with self._device.lock:
            if self._closing or self._device.dead is not None or self._device.stuck:
                raise Unhealthy
            request = self._core.add(encodings, heads, now_ns)
            if self._cache is not None:
                self.metrics.cache_bytes.set(self._cache.bytes)
            if request.done:  # the cache had all of it
                return request
            request.waiter = (
                asyncio.get_running_loop().create_future()
            )  # before a lane can complete it
            self._open.add(request)
            self._device.added(self._instance)
        try:
            await request.waiter
        except asyncio.CancelledError:
            request.cancelled = True
            self.metrics.dropped.add()
            raise
        finally:
            self._open.discard(request)
        if request.error is not None:
            raise request.error
        return request

    async def check_health(self) -> None:
        """Return if the last pass succeeded; otherwise run a pass of one token. Raises Unhealthy."""
        if (
            self._closing
            or self._device.dead is not None
            or self._instance.overdue
            or not self._device.alive
        ):
            raise Unhealthy
        if self._instance.healthy:
            return
        spec = self._backend.spec
        probe = Encoding(np.array([spec.positions.offset], dtype=np.int64))
        try:
            await self.run([probe], frozenset({next(iter(sorted(spec.heads)))}), perf_counter_ns())
        except BackendError as error:
            raise Unhealthy from error

    def _on_complete(self, requests: Sequence[EngineRequest]) -> None:
        if requests and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, requests)

    def _on_death(self, error: BackendError) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_open, error)

    def _fail_open(self, error: BackendError) -> None:
        for request in self._open:
            request.error = error
        _wake(self._open)


def _wake(requests: Iterable[EngineRequest]) -> None:
    for request in requests:
        request.wake()


def run_all(
    core: EngineCore, backend: Backend, callers: int, advance: Callable[[int], object]
) -> None:
    """Take, run, give, until nothing waits: an engine without clocks, deadlines and cancellation, with the answers of `Engine`.

    `callers` passes run at once. `advance`: called with the number of sequences of each pass. Raises a pass's error after the
    others have ended.
    """
    alone = callers == 1 or core.is_one_pass
    lock = threading.Lock()

    def loop() -> None:
        while True:
            with lock:
                batch = core.take(
                    device_idle=alone
                )  # several callers: a batch must not depend on which of them ends first
            if batch is None:
                return
            try:
                parts = batch.split(backend.forward(batch.packed, use_all_cores=alone))
            except BaseException as error:
                with lock:
                    core.fail(batch, error)
                    core.fail_all(error)
                raise
            with lock:
                core.give(batch, parts)
                advance(len(batch.rows))

    if alone:
        loop()
        return
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(callers) as pool:
        for done in [pool.submit(loop) for _ in range(callers)]:
            done.result()
