"""One model under asyncio: admission, a tokenizer pool, and `Engine`, its queue on a device.

It has no policy of its own: `Bound` admits, `EngineCore` orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from time import monotonic, perf_counter_ns
from typing import Any, Protocol, TypeVar

import numpy as np

from hybridtei.batch import Encoding, Head, WindowEncoding
from hybridtei.config import EngineConfig
from hybridtei.errors import (
    AnswerTooLarge,
    BackendError,
    TokenizerError,
    Unhealthy,
)
from hybridtei.inference.backends.base import DAMAGED, Backend
from hybridtei.inference.engine.chunks import (
    GATHERERS,
    Answered,
    joined,
    run_in_chunks,
)
from hybridtei.inference.engine.core import EngineBatch, EngineCore, ResultCache, shared_tokens
from hybridtei.inference.engine.device import Device, ModelInstance
from hybridtei.inference.engine.scheduler import EngineRequest
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.limits import SPENDING, Bound, Bounds, Deadlines
from hybridtei.models.text.reader import PORTION_CHARACTERS, TextReader
from hybridtei.models.text.tokenizer import SHORT_CHARACTERS, Tokenizer
from hybridtei.outputs import Cut, HeadOutputs, Timings, cuts_of
from hybridtei.system.machine import LaneKind, available_cores
from hybridtei.system.metrics import Registry, powers_of_two
from hybridtei.system.own_thread import awaited
from hybridtei.system.turns import Turns

MEGABYTE = 1_000_000
# Average bytes of a float32 in JSON: sign, point, nine digits, comma
BYTES_PER_NUMBER = 12
# The exception of a panic in Rust code; no subclass of Exception
PANIC = "PanicException"
# Inputs of a request that is tokenised on the event loop
SHORT_INPUTS = 8
# Pieces of work without a pass (`/tokenize`, `/decode`) inside at once
MAX_ASIDE = 64

T = TypeVar("T")


class EngineService:
    """One model for many callers on one event loop."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: EngineConfig,
        *,
        budget_tokens: int,
        registry: Registry | None = None,
        device: Device | None = None,
        engine: EngineClient | None = None,
    ) -> None:
        """`device`: shares its lanes with other models; None: the model has its own lanes.
        `engine`: the client of an engine in another process."""
        self.model = model
        self.backend = backend
        self.config = config
        self.budget_tokens = budget_tokens
        self.workers = config.tokenization_workers or default_tokenization_workers()
        self.admission = Bound(config.max_concurrent_requests)
        self._own_device: Device | None = None
        if engine is None and device is None:
            device = self._own_device = Device(
                backend.lanes, bulk_niceness=config.bulk_niceness, pass_timeout=config.pass_timeout
            )
        self.engine = engine or engine_of(
            backend, config, budget_tokens, registry or Registry(), device
        )
        self._closing = False
        self._pool = Turns(self.workers, "tokenize")
        self._side_pool = Turns(1, "aside")
        self.beside = Bound(MAX_ASIDE)
        # Calls that collect inputs before they are ranked
        self.gathering = Bound(max(config.max_concurrent_requests // GATHERERS, 1))
        self.deadlines = Deadlines(config.request_timeout)

    async def start(self) -> None:
        """Join the device. Requests complete on the running loop."""
        await self.engine.start()
        if self._own_device is not None:
            self._own_device.start()

    async def stop(self, seconds: float | None = None) -> None:
        """Fail waiting requests, wait for running batches, and free the model's memory, unless a
        batch takes longer than `seconds`."""
        self._closing = True
        end = monotonic() + (inf if seconds is None else seconds)
        await self.engine.stop(seconds)
        self.deadlines.close()
        if self._own_device is not None:
            await asyncio.to_thread(self._own_device.stop, end - monotonic())
        for pool in (self._pool, self._side_pool):
            # The queue refuses its remaining work
            pool.shutdown()

    @property
    def reader(self) -> TextReader:
        """The model's reader of texts: limits, prompts, tokens."""
        return self.model.reader

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, for work without a pass."""
        return self.model.reader.tokenizer

    @property
    def dead(self) -> BackendError | None:
        """The error that ended its lanes or makes them unreachable; None while they serve."""
        return self.engine.dead

    async def run(
        self,
        task: Task[T],
        *,
        characters: int | None = None,
        bounds: Bounds | None = None,
        check: Callable[[], object] | None = None,
    ) -> Answered[T]:
        """Admit, split, tokenise, queue, wait, finish, join. `characters`: of all inputs, if
        counted. `bounds`: the split of a large request; default: one chunk. `check`: called instead
        of the task's own check.

        Permits are taken once and held until the last chunk is done. Raises Overloaded at once,
        RequestError for bad input, BackendError if a pass fails, TimedOut if a chunk takes too
        long; of several failures, the first chunk's. Cancelling the caller frees the permits and
        removes waiting sequences from the queue.
        """
        bounds = bounds or Bounds.whole(task.size)
        with self.admission.inside(bounds.permits, is_large=bounds.turns):
            if check is None:
                task.check(self.model.spec)
            else:
                check()
            if task.embeds:
                task = task.for_model(self.model.spec)
            first, size = task, bounds.inputs
            if size > bounds.chunk or task.splits_itself:
                first, *others = chunks = task.split(bounds.chunk)
                if others:
                    return await run_in_chunks(task, chunks, bounds, self._run_chunk)
            is_short = is_light = False
            if characters is not None:
                is_short = size <= SHORT_INPUTS and characters <= SHORT_CHARACTERS
                is_light = characters <= PORTION_CHARACTERS
            answered = await self._run_chunk(first, size, is_short=is_short, is_light=is_light)
            if bounds.max_numbers < inf:
                bounds.check(first.numbers(answered.answer))
            return answered

    async def _run_chunk(
        self, chunk: Task[T], size: int, *, is_short: bool = False, is_light: bool = False
    ) -> Answered[T]:
        """Tokenise, compute, finish; in parts, if the chunk leaves windows for another one.
        `is_short`: tokenise on the event loop; `is_light`: before others' long texts."""
        parts: list[Answered[T]] = []
        part: Task[T] | None = chunk
        while part is not None:
            began = perf_counter_ns()
            with self.deadlines.within():
                if is_short:
                    # Faster than waking a thread of the pool
                    encodings = self._prepared(part)
                else:
                    prepare = partial(part.prepare, self.model)
                    encodings = await self._in(self._pool, prepare, is_short=is_light)
                lengths: list[int] = []
                cuts: Sequence[Cut] = ()
                for encoding in encodings:
                    lengths.append(len(encoding.input_ids))
                    if encoding.extent is not None and not cuts:
                        cuts = cuts_of(encodings, size)
                spending = SPENDING.get()
                if spending is not None:
                    spending.take(sum(lengths))
                if part.embeds:
                    self.check_answer(part.max_numbers(self.model.spec, sum(lengths)))
                tokenised = perf_counter_ns()
                tokenisation = (tokenised - began) // max(size, 1)
                if not part.heads:
                    # There is nothing to compute
                    answer = part.finish(self.model, encodings, HeadOutputs())
                    return Answered(answer, size, lengths, Timings(tokenisation, 0, 0), cuts)
                request = await self.engine.run(encodings, part.heads, tokenised)
                if part.finishes_aside(self.model.spec):
                    finish = partial(part.finish, self.model, encodings, request.outputs())
                    answer = await self._in(self._pool, finish, is_short=True)
                else:
                    answer = part.finish(self.model, encodings, request.outputs())
            times = request.timings()
            timings = Timings(tokenisation, times.queue_ns, times.inference_ns)
            parts.append(Answered(answer, size, lengths, timings, cuts))
            if not (encodings and isinstance(encodings[-1], WindowEncoding)):
                break
            part = part.rest(encodings)
            if part is not None:
                part = part.knowing(answer)
        return parts[0] if len(parts) == 1 else joined(chunk, parts, same_inputs=True)

    def _prepared(self, chunk: Task[Any]) -> list[Encoding]:
        """Tokenise on the event loop."""
        try:
            return chunk.prepare(self.model)
        except BaseException as error:
            raise_panic(error)
            raise

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work without a pass on a separate thread, so that it delays no pass. Raises
        Overloaded if `MAX_ASIDE` pieces are inside, and TimedOut."""
        with self.beside.inside(1), self.deadlines.within():
            return await self._in(self._side_pool, work, is_short=True)

    def check_answer(self, numbers: int) -> None:
        """Raises AnswerTooLarge if this count of numbers would exceed `--max-answer-bytes` as
        JSON."""
        size, limit = numbers * BYTES_PER_NUMBER, self.config.max_answer_bytes
        if size > limit:
            raise AnswerTooLarge(
                f"the answer would take about {size} bytes > maximum allowed {limit} "
                "(max-answer-bytes): send fewer inputs"
            )

    async def _in(self, pool: Turns, work: Callable[[], T], *, is_short: bool) -> T:
        """Run work on a pool. Cancelling the caller cancels work that has not begun, and ends work
        on a long text. Raises Unhealthy when closing."""
        if self._closing:
            raise Unhealthy
        try:
            if is_short and not pool.long:
                # Nothing has to give way
                return await asyncio.get_running_loop().run_in_executor(pool.threads, work)
            return await awaited(partial(pool.submit, is_short=is_short), work)
        except BaseException as error:
            raise_panic(error)
            raise

    async def check_health(self) -> None:
        """Return if the last pass succeeded; otherwise run a pass of one token. Raises
        Unhealthy."""
        await self.engine.check_health()


def default_tokenization_workers() -> int:
    """TEI's rule: the number of processors minus 1, between 1 and 64."""
    return min(max(available_cores() - 1, 1), 64)


def raise_panic(error: BaseException) -> None:
    """Turn a panic of the tokenizer into a TokenizerError, so that it fails only its own
    request."""
    if type(error).__name__ == PANIC:
        raise TokenizerError(f"the tokenizer gave up: {error}") from error


class BatchMetrics:
    """Counters of batches, under TEI's names, and of passes, lanes and saved work, under ours.
    `core`: the queue."""

    def __init__(
        self, registry: Registry, core: EngineCore, cache: ResultCache | None = None
    ) -> None:
        self._budget_tokens = core.max_tokens
        self.size = registry.histogram("te_batch_next_size", powers_of_two(4096))
        self.tokens = registry.histogram("te_batch_next_tokens", powers_of_two(1_048_576))
        self._passes = 0
        self.forwards = registry.counted("hybridtei_forward_passes_total", lambda: self._passes)
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
        # Requests cancelled while they waited for a pass
        self.dropped = registry.counter("hybridtei_dropped_requests_total")
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
        self._passes += 1


class EngineClient(Protocol):
    """Computes a service's encodings: in this process (`Engine`), or in another one
    (`engine_process.RemoteEngine`)."""

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
        # Requests with waiting callers
        self._open: set[EngineRequest] = set()
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
        # A pass that does not end still needs the weights
        if not self.busy:
            self._backend.close()

    async def run(
        self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int
    ) -> EngineRequest:
        """Queue a request, and return it with all outputs. Raises BackendError if a pass fails, and
        Unhealthy when closing.

        Cancelling the caller removes its waiting sequences from the queue.
        """
        with self._device.lock:
            if self._closing or self._device.dead is not None or self._device.stuck:
                raise Unhealthy
            request = self._core.add(encodings, heads, now_ns)
            if self._cache is not None:
                self.metrics.cache_bytes.set(self._cache.bytes)
            # The cache had all outputs
            if request.done:
                return request
            # The waiter exists before a lane can complete the request
            request.waiter = asyncio.get_running_loop().create_future()
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
        """Return if the last pass succeeded; otherwise run a pass of one token. Raises
        Unhealthy."""
        if (
            self._closing
            or self._device.dead is not None
            or self._instance.overdue
            or not self._device.alive
        ):
            raise Unhealthy
        if self._instance.healthy and not DAMAGED:
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


def engine_of(
    backend: Backend,
    config: EngineConfig,
    budget_tokens: int,
    registry: Registry,
    device: Device | None,
) -> Engine:
    """Return the engine of a loaded model. It counts in `registry`."""
    assert device is not None
    cache = ResultCache(config.embedding_cache_mb * MEGABYTE) if config.embedding_cache_mb else None
    core = EngineCore(
        max_tokens=budget_tokens,
        max_sequences=config.max_batch_requests,
        positions=backend.spec.positions,
        padding=backend.padding,
        lanes=backend.lanes,
        cache=cache,
        shared_tokens=shared_tokens(backend, config),
    )
    return Engine(core, backend, device, registry, cache)
