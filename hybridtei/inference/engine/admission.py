"""Bounds the number of inputs inside (`Admission`), their chunks (`Bounds`) and their time
(`Deadlines`).

A request without a free permit is refused at once. A gRPC stream takes a permit a message and
carries it into the task that it starts, so that the same handlers serve both.

A request of many inputs runs in several turns with the same permits, and a stream may have endless
messages. A few of these could hold all permits for minutes, so they leave a share of the permits to
requests of one turn, such as queries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from msgspec import Struct

from hybridtei.errors import Overloaded, RequestError, RequestRefused, TimedOut
from hybridtei.inference.engine.core import SHORT_TOKENS
from hybridtei.inference.tasks.base import Task
from hybridtei.outputs import Cut, Timings

if TYPE_CHECKING:
    from hybridtei.inference.backends.base import Backend

T = TypeVar("T")
Start = Callable[[], Coroutine[Any, Any, T]]
# 1 / SHARE_LEFT of the permits is not given to requests of several turns or to streams
SHARE_LEFT = 4
# 1 / GATHERERS of the permits is the number of calls that may read their inputs at a time
GATHERERS = 16


def permits_for(permits: int, backend: Backend, budget_tokens: int) -> int:
    """Return the default number of permits for a backend: `permits`, or on a GPU the number of
    texts of `SHORT_TOKENS` in all concurrent passes. With fewer permits, passes of short texts
    would not reach their budget of tokens."""
    passes = len(backend.lanes) + backend.ahead if backend.ahead else 0
    return max(permits, passes * budget_tokens // SHORT_TOKENS)


def max_of_turns(permits: int) -> int:
    """Return how many of `permits` all requests of several turns, and all streams, may hold
    together."""
    return max(1, permits - permits // SHARE_LEFT)


MAX_CHUNKS_AT_ONCE = 2
# 64 MB as float32, about three times as much as JSON: ten thousand vectors of 1,600
MAX_ANSWER_NUMBERS = 16_000_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a request of `inputs` inputs: at most `chunk` inputs a chunk, and `at_once`
    chunks at once. It holds `permits` permits from before the first chunk until after the last.
    `max_numbers`: in the answer."""

    inputs: int
    chunk: int
    at_once: int
    permits: int
    max_numbers: int | None = None
    # True if the permits are held for several chunks, one after the other
    turns: bool = False

    @classmethod
    def whole(cls, inputs: int) -> Self:
        """Return the bounds of one chunk, with a permit an input."""
        return cls(inputs, max(inputs, 1), 1, inputs)

    @classmethod
    def of(cls, inputs: int, *, largest: int, permits: int) -> Self:
        """Return bounds for more inputs than the `largest` allowed request. `permits`, the total,
        may be fewer. As many inputs are inside as in `MAX_CHUNKS_AT_ONCE` ordinary requests. The
        answer grows with the request, so it is bounded too."""
        if inputs <= min(largest, permits):
            return cls(inputs, max(inputs, 1), 1, inputs, MAX_ANSWER_NUMBERS)
        available = max_of_turns(permits)
        chunk = min(largest, available)
        at_once = min(MAX_CHUNKS_AT_ONCE, available // chunk)
        held = min(inputs, chunk * at_once)
        return cls(inputs, chunk, at_once, held, MAX_ANSWER_NUMBERS, held < inputs)

    def of_inputs(self, inputs: int) -> Self:
        """Return the same bounds of `inputs` inputs, of which each is more than one permit."""
        return replace(self, inputs=inputs)

    def in_chunks(self, chunk: int) -> Self:
        """Return bounds with the same permits and another chunk size, for tasks whose inputs cost
        less than their permits."""
        return replace(self, chunk=chunk, at_once=MAX_CHUNKS_AT_ONCE)


class Answered(Struct, Generic[T], frozen=True):
    """The answer of a task or a chunk, its number of inputs, each encoding's tokens, its times
    (means over the inputs), and the inputs that were cut."""

    answer: T
    size: int
    lengths: list[int]
    timings: Timings
    cuts: Sequence[Cut] = ()


async def run_in_chunks(
    task: Task[T],
    chunks: Sequence[Task[T]],
    bounds: Bounds,
    run_chunk: Callable[[Task[T], int], Coroutine[Any, Any, Answered[T]]],
) -> Answered[T]:
    """Run the chunks of a large task by `run_chunk`, and join their answers. Raises the first
    chunk's error."""
    place, numbers = 0, 0

    async def run(chunk: Task[T], begin: int) -> Answered[T]:
        nonlocal numbers
        try:
            answered = await run_chunk(chunk, chunk.size)
        except RequestError as error:
            if error.place is not None:
                error.place += begin
            raise
        numbers += chunk.numbers(answered.answer)
        check_numbers(numbers, bounds)
        return answered

    def starts(chunks: Iterable[Task[T]]) -> Iterator[Start[Answered[T]]]:
        nonlocal place
        for chunk in chunks:
            yield partial(run, chunk, place)
            place += chunk.size

    if not task.needs_first:
        return joined(task, await in_order(starts(chunks), bounds.at_once))
    (start,) = starts(chunks[:1])
    first = await start()
    others = (chunk.knowing(first.answer) for chunk in chunks[1:])
    return joined(task, [first, *await in_order(starts(others), bounds.at_once)])


def too_many_numbers(limit: int) -> RequestRefused:
    """Return the error of an answer with more than `limit` numbers."""
    return RequestRefused(
        f"the answer would hold more than {limit} numbers: send fewer inputs at once"
    )


def check_numbers(numbers: int, bounds: Bounds) -> None:
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


def joined(task: Task[T], done: Sequence[Answered[T]], *, same_inputs: bool = False) -> Answered[T]:
    """Join chunks to the answer of the whole task. Times are means over all inputs. `same_inputs`:
    the chunks are parts of the same inputs, one after the other."""
    inputs = max(task.size, 1)
    timings = Timings(
        sum(chunk.size * chunk.timings.tokenization_ns for chunk in done) // inputs,
        sum(chunk.size * chunk.timings.queue_ns for chunk in done) // inputs,
        sum(chunk.size * chunk.timings.inference_ns for chunk in done) // inputs,
    )
    answer = task.join([chunk.answer for chunk in done])
    lengths: list[int] = []
    cuts: list[Cut] = []
    begin = 0
    for chunk in done:
        lengths += chunk.lengths
        cuts += [Cut(begin + cut.index, cut.characters) for cut in chunk.cuts]
        if not same_inputs:
            begin += chunk.size
    return Answered(answer, task.size, lengths, timings, cuts)


class _Inside:
    """Holds permits while a block runs. A class, since every request enters one and a generator is
    slower."""

    __slots__ = ("_admission", "_inputs", "_taken", "_turns")

    def __init__(self, admission: Admission, inputs: int, turns: bool) -> None:
        self._admission, self._inputs, self._turns, self._taken = admission, inputs, turns, 0

    def __enter__(self) -> None:
        carrier, carried = _carried.get()
        if carrier is self._admission and self._inputs <= carried:
            return
        self._admission.take(self._inputs, turns=self._turns)
        self._taken = self._inputs

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._admission.give_back(self._taken)


class Admission:
    """Gives `permits` permits. Only the event loop's thread may use it."""

    def __init__(self, permits: int) -> None:
        self.permits = self.free = permits
        self.left = permits - max_of_turns(permits)

    def inside(self, inputs: int, *, turns: bool = False) -> _Inside:
        """A context that holds one permit an input. `turns`: for several turns. Raises Overloaded
        on entry, with no effect, if too few are free. A caller that carries enough permits takes
        none."""
        return _Inside(self, inputs, turns)

    def take(self, inputs: int, *, turns: bool = False) -> None:
        """Take one permit an input. Raises Overloaded."""
        if inputs > self.free - (self.left if turns else 0):
            raise Overloaded
        self.free -= inputs

    def give_back(self, permits: int) -> None:
        """Give permits back."""
        self.free += permits

    @contextmanager
    def carrying(self, inputs: int) -> Iterator[None]:
        """A context in which this number of inputs, also in tasks started inside, needs no further
        permits."""
        before = _carried.set((self, inputs))
        try:
            yield
        finally:
            _carried.reset(before)


_carried: ContextVar[tuple[Admission | None, int]] = ContextVar(
    "carried_permits", default=(None, 0)
)


@dataclass(eq=False, slots=True)
class _Limited:
    """A context whose task is cancelled at the deadline, and then raises TimedOut. `cancelling`:
    its earlier cancellations."""

    deadlines: Deadlines
    task: asyncio.Task[Any]
    deadline: float
    cancelling: int
    late: bool = False

    def __enter__(self) -> None:
        deadlines = self.deadlines
        deadlines.running[self] = None
        if deadlines.timer is None:
            deadlines.timer = asyncio.get_running_loop().call_later(
                deadlines.seconds, deadlines.look
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        deadlines = self.deadlines
        deadlines.running.pop(self, None)
        if self.late and kind is asyncio.CancelledError and self.task.uncancel() <= self.cancelling:
            seconds = f"{deadlines.seconds:g}"
            raise TimedOut(
                f"no answer within {seconds} seconds (request-timeout): try again later"
            ) from None


class Deadlines:
    """Bounds each piece of work to `seconds` of `clock`; 0: no bound. Used from one event loop's
    thread.

    `asyncio.timeout` would make and cancel a timer per request, which costs as much as tokenising a
    short text. All work has the same bound, so a single timer for the oldest work suffices.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        # In order of their starts
        self.running: dict[_Limited, None] = {}
        self.timer: asyncio.TimerHandle | None = None

    def limit(self) -> AbstractContextManager[None]:
        """A context that raises TimedOut at the deadline, after the work within has ended by
        cancellation."""
        task = asyncio.current_task()
        if not self.seconds or task is None:
            return UNLIMITED
        return _Limited(self, task, self._clock() + self.seconds, task.cancelling())

    def close(self) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.running.clear()

    def look(self) -> None:
        self.timer = None
        now = self._clock()
        for work in [*self.running]:
            if work.deadline > now:
                self.timer = asyncio.get_running_loop().call_later(work.deadline - now, self.look)
                return
            del self.running[work]
            work.late = True
            work.task.cancel()


UNLIMITED = nullcontext()
