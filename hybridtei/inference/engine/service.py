"""One model under asyncio: admission, chunks of a large request, a tokenizer pool, its engine.

It has no policy of its own: `Admission` admits, `EngineCore` orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, perf_counter_ns
from typing import Any, Generic, TypeVar

from hybridtei.batch import Encoding
from hybridtei.config import EngineConfig
from hybridtei.errors import (
    AnswerTooLarge,
    BackendError,
    EmptyInput,
    RequestRefused,
    TokenizerError,
    Unhealthy,
)
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.admission import Admission, Bounds, Deadlines
from hybridtei.inference.engine.core import EngineCore, ResultCache, shared_tokens
from hybridtei.inference.engine.device import Device
from hybridtei.inference.engine.engine import Engine, EngineClient
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.models.text.reader import TextReader
from hybridtei.models.text.tokenizer import SHORT_CHARACTERS, Tokenizer
from hybridtei.outputs import HeadOutputs, Timings
from hybridtei.system.machine import available_cores
from hybridtei.system.metrics import Registry

MEGABYTE = 1_000_000
BYTES_PER_NUMBER = 12  # average bytes of a float32 in JSON: sign, point, nine digits, comma
PANIC = "PanicException"  # the exception of a panic in Rust code; no subclass of Exception
# Inputs of a request that is tokenised on the event loop
SHORT_INPUTS = 8
MAX_ASIDE = 64  # pieces of work without a pass (`/tokenize`, `/decode`) inside at once

T = TypeVar("T")
Start = Callable[[], Coroutine[Any, Any, T]]


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """The answer of a task or a chunk, its number of inputs, each encoding's tokens, and its times:
    means over the inputs."""

    answer: T
    size: int
    lengths: list[int]
    timings: Timings


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
        self.admission = Admission(config.max_concurrent_requests)
        self._own_device: Device | None = None
        if engine is None and device is None:
            device = self._own_device = Device(
                backend.lanes, bulk_niceness=config.bulk_niceness, pass_timeout=config.pass_timeout
            )
        self.engine = engine or engine_of(
            backend, config, budget_tokens, registry or Registry(), device
        )
        self._closing = False
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tokenize")
        self._side_pool = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self.beside = Admission(MAX_ASIDE)
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
            pool.shutdown(wait=False)  # the queue refuses its remaining work

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
        with self.admission.inside(bounds.permits, turns=bounds.turns):
            if check is None:
                task.check(self.model.spec)
            else:
                check()
            task = task.for_model(self.model.spec)
            first, *others = task.split(bounds.chunk)
            if others:
                return await self._run_in_chunks(task, first, others, bounds)
            size = bounds.inputs
            short = (
                size <= SHORT_INPUTS and characters is not None and characters <= SHORT_CHARACTERS
            )
            answered = await self._run_chunk(first, size, short=short)
            if bounds.max_numbers is not None:
                _check_numbers(first.numbers(answered.answer), bounds)
            return answered

    async def _run_in_chunks(
        self, task: Task[T], first: Task[T], others: Sequence[Task[T]], bounds: Bounds
    ) -> Answered[T]:
        place, numbers = 0, 0

        async def run(chunk: Task[T], begin: int) -> Answered[T]:
            nonlocal numbers
            try:
                answered = await self._run_chunk(chunk, chunk.size)
            except EmptyInput as error:
                error.place = None if error.place is None else error.place + begin
                raise
            numbers += chunk.numbers(answered.answer)
            _check_numbers(numbers, bounds)
            return answered

        def starts(chunks: Iterable[Task[T]]) -> Iterator[Start[Answered[T]]]:
            nonlocal place
            for chunk in chunks:
                yield partial(run, chunk, place)
                place += chunk.size

        if not task.needs_first:
            return _joined(task, await in_order(starts([first, *others]), bounds.at_once))
        (begin,) = starts([first])
        known = await begin()
        chunks = (chunk.knowing(known.answer) for chunk in others)
        return _joined(task, [known, *await in_order(starts(chunks), bounds.at_once)])

    async def _run_chunk(self, chunk: Task[T], size: int, *, short: bool = False) -> Answered[T]:
        """Tokenise, compute, finish. `short`: on the event loop."""
        began = perf_counter_ns()
        with self.deadlines.limit():
            if short:
                # Faster than waking a thread of the pool
                encodings = self._prepared(chunk)
            else:
                encodings = await self._in(self._pool, partial(chunk.prepare, self.model))
            lengths = [len(encoding.input_ids) for encoding in encodings]
            numbers = chunk.max_numbers(self.model.spec, sum(lengths))
            if numbers:
                self.check_answer(numbers)
            tokenised = perf_counter_ns()
            tokenisation = (tokenised - began) // max(size, 1)
            if not chunk.heads:
                # There is nothing to compute
                answer = chunk.finish(self.model, encodings, HeadOutputs())
                return Answered(answer, size, lengths, Timings(tokenisation, 0, 0))
            request = await self.engine.run(encodings, chunk.heads, tokenised)
            if chunk.finishes_aside(self.model.spec):
                finish = partial(chunk.finish, self.model, encodings, request.outputs())
                answer = await self._in(self._pool, finish)
            else:
                answer = chunk.finish(self.model, encodings, request.outputs())
        times = request.timings()
        return Answered(
            answer, size, lengths, Timings(tokenisation, times.queue_ns, times.inference_ns)
        )

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
        with self.beside.inside(1), self.deadlines.limit():
            return await self._in(self._side_pool, work)

    def check_answer(self, numbers: int) -> None:
        """Raises AnswerTooLarge if this count of numbers would exceed `--max-answer-bytes` as JSON."""
        size, limit = numbers * BYTES_PER_NUMBER, self.config.max_answer_bytes
        if size > limit:
            raise AnswerTooLarge(
                f"the answer would take about {size} bytes > maximum allowed {limit} (max-answer-bytes): send fewer inputs"
            )

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Run work on a pool. Cancelling the caller cancels work that has not begun. Raises
        Unhealthy when closing."""
        if self._closing:
            raise Unhealthy
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except BaseException as error:
            raise_panic(error)
            raise

    async def check_health(self) -> None:
        """Return if the last pass succeeded; otherwise run a pass of one token. Raises Unhealthy."""
        await self.engine.check_health()


def default_tokenization_workers() -> int:
    """TEI's rule: the number of processors minus 1, between 1 and 64."""
    return min(max(available_cores() - 1, 1), 64)


def too_many_numbers(limit: int) -> RequestRefused:
    """Return the error of an answer with more than `limit` numbers."""
    return RequestRefused(
        f"the answer would hold more than {limit} numbers: send fewer inputs at once"
    )


def _check_numbers(numbers: int, bounds: Bounds) -> None:
    if bounds.max_numbers is not None and numbers > bounds.max_numbers:
        raise too_many_numbers(bounds.max_numbers)


async def in_order(starts: Iterator[Start[T]], at_once: int) -> list[T]:
    """Return all results in order; `at_once` run concurrently. Raises the error of the first
    failing one, and starts no more."""
    done: list[T] = []
    running: list[asyncio.Task[T]] = []
    try:
        for start in starts:
            if len(running) == at_once:
                done.append(await running.pop(0))
            running.append(asyncio.ensure_future(start()))
        while running:
            done.append(await running.pop(0))
    finally:
        for unfinished in running:
            unfinished.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return done


def _joined(task: Task[T], done: Sequence[Answered[T]]) -> Answered[T]:
    """Join chunks to the answer of the whole task. Times are means over all inputs."""
    inputs = max(task.size, 1)
    timings = Timings(
        sum(one.size * one.timings.tokenization_ns for one in done) // inputs,
        sum(one.size * one.timings.queue_ns for one in done) // inputs,
        sum(one.size * one.timings.inference_ns for one in done) // inputs,
    )
    answer = task.join([one.answer for one in done])
    return Answered(answer, task.size, [length for one in done for length in one.lengths], timings)


def raise_panic(error: BaseException) -> None:
    """Turn a panic of the tokenizer into a TokenizerError, so that it fails only its own request."""
    if type(error).__name__ == PANIC:
        raise TokenizerError(f"the tokenizer gave up: {error}") from error


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
