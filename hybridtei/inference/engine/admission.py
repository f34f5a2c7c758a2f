"""How many inputs may be inside at once (`Admission`), and for how long (`Deadlines`).

Over HTTP no request waits for a permit: it is refused at once. Over gRPC, streams and reranking wait, and carry permits into
the tasks they start, so that the same handlers serve both.

A request of many inputs goes through in several turns with the same permits, and a stream that waits may have messages without
end. A few of those could hold all permits for minutes. So they leave a share to requests of one turn: a query finds a permit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hybridtei.errors import Overloaded, TimedOut
from hybridtei.inference.engine.core import SHORT_TOKENS

if TYPE_CHECKING:
    from hybridtei.inference.backends.base import Backend

T = TypeVar("T")
SHARE_LEFT = 4  # one permit of so many is not given to requests of several turns, nor to those who wait
GATHERERS = 16  # of so many permits, one may be held by a call that still reads its inputs


def permits_for(permits: int, backend: Backend, budget_tokens: int) -> int:
    """Return how many permits serve a backend by default: `permits`, and on a GPU as many as there are texts of `SHORT_TOKENS`
    in the passes that are under way at once. Fewer would end passes of short texts long before their budget of tokens."""
    ahead = getattr(backend, "ahead", 0)
    passes = len(backend.lanes) + ahead if ahead else 0
    return max(permits, passes * budget_tokens // SHORT_TOKENS)


def max_of_turns(permits: int) -> int:
    """Return how many of all `permits` requests of several turns, and those who wait, may hold together."""
    return max(1, permits - permits // SHARE_LEFT)


MAX_CHUNKS_AT_ONCE = 2
MAX_ANSWER_NUMBERS = 16_000_000  # 64 MB as float32, about three times as much as JSON: ten thousand vectors of 1,600


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a request of `inputs` inputs goes through: at most `chunk` inputs a chunk, `at_once` chunks at once, under `permits`
    permits that are held from before the first chunk until after the last. `max_numbers`: in the answer."""

    inputs: int
    chunk: int
    at_once: int
    permits: int
    max_numbers: int | None = None

    @property
    def turns(self) -> bool:
        """Whether the permits are held for several chunks, one after the other."""
        return self.permits < self.inputs

    @classmethod
    def whole(cls, inputs: int) -> Self:
        """Return the bounds of one chunk, with a permit an input."""
        return cls(inputs, max(inputs, 1), 1, inputs)

    @classmethod
    def of(cls, inputs: int, *, largest: int, permits: int) -> Self:
        """Return bounds for more inputs than the `largest` request may have, where all `permits` together may be fewer than
        that.

        As many inputs are inside at once as `MAX_CHUNKS_AT_ONCE` ordinary requests hold. The answer grows with the request, so
        it is bounded too.
        """
        if inputs <= min(largest, permits):
            return cls(inputs, max(inputs, 1), 1, inputs, MAX_ANSWER_NUMBERS)
        available = max_of_turns(permits)
        chunk = min(largest, available)
        at_once = min(MAX_CHUNKS_AT_ONCE, available // chunk)
        return cls(inputs, chunk, at_once, min(inputs, chunk * at_once), MAX_ANSWER_NUMBERS)

    def in_chunks(self, chunk: int) -> Self:
        """Return bounds of the same permits and so many inputs a chunk, for tasks whose inputs cost less than their permits."""
        return replace(self, chunk=chunk, at_once=MAX_CHUNKS_AT_ONCE)


class _Inside:
    """Permits while a block runs: every request has one, so it is no generator."""

    __slots__ = ("_admission", "_inputs", "_taken", "_turns")

    def __init__(self, admission: Admission, inputs: int, turns: bool) -> None:
        self._admission, self._inputs, self._turns, self._taken = admission, inputs, turns, 0

    def __enter__(self) -> None:
        self._taken = self._admission.take_or_refuse(self._inputs, turns=self._turns)

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._admission.give_back(self._taken)


@dataclass(slots=True, eq=False)
class _Waiter:
    missing: int
    served: asyncio.Future[None]


class Admission:
    """`permits` to give; used from one thread, the event loop's."""

    def __init__(self, permits: int) -> None:
        self.permits = self.free = permits
        self._left = permits - max_of_turns(permits)
        self._waiting: deque[_Waiter] = deque()
        self.gathering = asyncio.Semaphore(max(permits // GATHERERS, 1))  # calls that keep inputs before they are ranked

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiting)

    def inside(self, inputs: int, *, turns: bool = False) -> _Inside:
        """Hold one permit an input within, maybe for several `turns`. Raises Overloaded on entering, with nothing done, if too
        few are free. A caller that carries enough takes none."""
        return _Inside(self, inputs, turns)

    def take_or_refuse(self, inputs: int, *, turns: bool = False) -> int:
        """See `inside`; return how many permits are to be given back."""
        carrier, carried = _carried.get()
        if carrier is self and inputs <= carried:
            return 0
        if inputs > self.free - (self._left if turns else 0):
            raise Overloaded
        self.free -= inputs
        return inputs

    async def wait(self, inputs: int) -> int:
        """Wait for a permit an input and return how many were taken: never more than waiting callers may hold.

        First come, first served; the first in line collects what others give back.
        """
        inputs = min(inputs, self.permits - self._left)
        waiter = _Waiter(inputs, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            await waiter.served
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self.give_back(inputs - waiter.missing)
            raise
        return inputs

    def give_back(self, permits: int) -> None:
        """Free permits that were taken."""
        self.free += permits
        if self._waiting:
            self._serve()

    @asynccontextmanager
    async def held(self, inputs: int) -> AsyncIterator[None]:
        """Wait for the permits and carry them within."""
        permits = await self.wait(inputs)
        try:
            with self.carrying(inputs):
                yield
        finally:
            self.give_back(permits)

    @contextmanager
    def carrying(self, inputs: int) -> Iterator[None]:
        """Let so many inputs within, and in tasks started there, take no permits of their own."""
        before = _carried.set((self, inputs))
        try:
            yield
        finally:
            _carried.reset(before)

    def _serve(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            taken = min(first.missing, max(self.free - self._left, 0))
            self.free -= taken
            first.missing -= taken
            if first.missing:
                return
            self._waiting.popleft()
            if not first.served.done():
                first.served.set_result(None)


_carried: ContextVar[tuple[Admission | None, int]] = ContextVar("carried_permits", default=(None, 0))


@dataclass(eq=False, slots=True)
class _Running:
    """A task, its deadline, and how often it had been cancelled before."""

    task: asyncio.Task[Any]
    deadline: float
    cancelling: int
    late: bool = False


class Deadlines:
    """Bounds each piece of work to `seconds` of `clock`; 0: no bound. Used from one event loop's thread.

    `asyncio.timeout` would make and cancel a timer for each request, which costs as much as tokenising a short text. Here all
    share the bound, so the one that began first is the first to be late, and a single timer waits for it.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._running: dict[_Running, None] = {}  # in order of beginning
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work. Raises TimedOut once it has been cancelled and has ended."""
        task = asyncio.current_task()
        if not self._seconds or task is None:
            return await work
        running = _Running(task, self._clock() + self._seconds, task.cancelling())
        self._running[running] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)
        try:
            return await work
        except asyncio.CancelledError:
            if running.late and task.uncancel() <= running.cancelling:
                raise TimedOut(f"no answer within {self._seconds:g} seconds (request-timeout): try again later") from None
            raise
        finally:
            self._running.pop(running, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._running.clear()

    def _look(self) -> None:
        self._timer = None
        now = self._clock()
        for running in [*self._running]:
            if running.deadline > now:
                self._timer = asyncio.get_running_loop().call_later(running.deadline - now, self._look)
                return
            del self._running[running]
            running.late = True
            running.task.cancel()
