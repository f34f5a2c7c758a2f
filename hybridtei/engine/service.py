"""One model under asyncio: admission, a tokenizer pool, its place on a device.

Holds no policy: who is let in is `Admission`'s, who rides when is `EngineCore`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, perf_counter_ns
from typing import Any, Generic, Protocol, TypeVar

from hybridtei.backends.base import Backend
from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import EngineConfig, default_tokenization_workers
from hybridtei.engine.admission import Admission
from hybridtei.engine.cache import ResultCache
from hybridtei.engine.core import EngineCore
from hybridtei.engine.device import Device
from hybridtei.engine.rides import Rides, Seat
from hybridtei.engine.timeouts import Deadlines
from hybridtei.errors import AnswerTooLarge, BackendError, TokenizerError, Unhealthy
from hybridtei.observability.metrics import Registry
from hybridtei.outputs import HeadOutputs, Timings
from hybridtei.tasks.embed import Embed, Model, embed_task
from hybridtei.text.tokenizer import SHORT_CHARACTERS

MEGABYTE = 1_000_000
BYTES_PER_NUMBER = 12  # of a float32 in JSON, on average: sign, point, nine digits, comma
PANIC = "PanicException"  # what Rust code raises when it gives up: no Exception, so that few would catch it
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


class EngineService:
    """One model, served to many callers on one event loop."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: EngineConfig,
        *,
        budget_tokens: int,
        registry: Registry | None = None,
        device: Device | None = None,
        rides: Seat | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`device`: whose lanes it shares with other models; without one it has lanes of its own.

        `rides`, `admission`: where the engine is in another process, the way to it and the permits that all who ask it share.
        """
        self.model = model
        self.backend = backend
        self.config = config
        self.budget_tokens = budget_tokens
        self.workers = config.tokenization_workers or default_tokenization_workers()
        self.admission = admission or Admission(config.max_concurrent_requests)
        self._own_device: Device | None = None
        if rides is None and device is None:
            device = self._own_device = Device(
                backend.lanes, bulk_niceness=config.bulk_niceness, pass_timeout=config.pass_timeout
            )
        self.rides = rides or _seat(backend, config, budget_tokens, registry or Registry(), device)
        self.metrics = self.rides.metrics
        self._closing = False
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tokenize")
        self._side_pool = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._beside = Admission(SIDE_QUEUE)
        self._deadlines = Deadlines(config.request_timeout)

    async def start(self) -> None:
        """Take a place on the device; answers will arrive on the running loop."""
        await self.rides.start()
        if self._own_device is not None:
            self._own_device.start()

    async def stop(self, seconds: float | None = None) -> None:
        """Let running batches end, fail what still waits, and give the model's memory back. A batch that takes longer than
        `seconds` is left alone, with the memory."""
        self._closing = True
        end = monotonic() + (inf if seconds is None else seconds)
        await self.rides.stop(seconds)
        self._deadlines.close()
        if self._own_device is not None:
            await asyncio.to_thread(self._own_device.stop, end - monotonic())
        for pool in (self._pool, self._side_pool):
            pool.shutdown(wait=False)  # what it still holds ends there, and is refused at the queue

    @property
    def dead(self) -> BackendError | None:
        """Why its lanes have ended, if they did so by themselves; or why they cannot be reached."""
        return self.rides.dead

    async def run(self, task: Task[T], *, inputs: int, characters: int | None = None) -> Answered[T]:
        """Admit, tokenise, queue, wait, finish. `inputs` permits are held all the while. `characters`: of them all, if counted.

        Raises Overloaded at once, RequestError for bad input, BackendError if the pass fails, TimedOut. Cancelling the caller
        frees the permits and takes what has not run out of the queue.
        """
        with self.admission.inside(inputs):
            return await self._deadlines.within(self._run(task, inputs, characters))

    async def _run(self, task: Task[T], inputs: int, characters: int | None) -> Answered[T]:
        if isinstance(task, Embed):
            task = embed_task(self.model.spec, task)
        task.check(self.model.spec)
        began = perf_counter_ns()
        if inputs == 1 and characters is not None and characters <= SHORT_CHARACTERS:
            with _panicking():
                encodings = task.prepare(self.model)  # in less time than it takes to wake a thread of the pool
        else:
            encodings = await self._in(self._pool, partial(task.prepare, self.model))
        if isinstance(task, Embed):
            self.check_answer(task.token_numbers(self.model.spec, sum(len(encoding) for encoding in encodings)))
        tokenised = perf_counter_ns()
        outputs, timings = await self.rides.ride(encodings, task.heads, tokenised)
        answer = task.finish(self.model, encodings, outputs)
        timings = Timings((tokenised - began) // max(inputs, 1), timings.queue_ns, timings.inference_ns)
        return Answered(answer, [len(encoding) for encoding in encodings], timings)

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work that needs no pass where it cannot hold up what does. Raises Overloaded if much waits there already, and
        TimedOut."""
        with self._beside.inside(1):
            return await self._deadlines.within(self._in(self._side_pool, work))

    async def within_deadline(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that asks others besides this engine, within the bound of time of a request. Raises TimedOut."""
        return await self._deadlines.within(work)

    def check_answer(self, numbers: int) -> None:
        """Raises AnswerTooLarge if so many numbers would pass `--max-answer-bytes` as JSON."""
        size, most = numbers * BYTES_PER_NUMBER, self.config.max_answer_bytes
        if size > most:
            raise AnswerTooLarge(
                f"the answer would take about {size} bytes > maximum allowed {most} (max-answer-bytes): send fewer inputs"
            )

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """If the caller goes before the work began, it never runs. Raises Unhealthy."""
        if self._closing:
            raise Unhealthy
        with _panicking():
            return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def check_health(self) -> None:
        """Nothing, if the last pass went well; else one token decides. Raises Unhealthy."""
        await self.rides.check_health()


@contextmanager
def _panicking() -> Iterator[None]:
    """A tokenizer that gives up harms its own request only. Raises TokenizerError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise TokenizerError(f"the tokenizer gave up: {error}") from error


def _seat(backend: Backend, config: EngineConfig, budget_tokens: int, registry: Registry, device: Device | None) -> Rides:
    assert device is not None
    cache = ResultCache(config.embedding_cache_mb * MEGABYTE) if config.embedding_cache_mb else None
    core = EngineCore(
        max_tokens=budget_tokens,
        max_sequences=config.max_batch_requests,
        positions=backend.spec.positions,
        padding=backend.padding,
        lanes=backend.lanes,
        cache=cache,
    )
    return Rides(core, backend, device, registry, cache)
