"""The owner of limits: `Bound` counts what all holders of something hold together, and `Deadlines`
bounds their time.

Units are what is really held: bytes that have arrived, permits, open calls. Nothing else compares
such a count with its limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Self, TypeVar

from hybridtei.errors import Overloaded, RequestRefused, TimedOut, TokensUsed

T = TypeVar("T")
# A quarter of a bound is not given to large holders
SHARE_LEFT = 4
# A holder of more bytes is large: a body, an answer
SMALL_BYTES = 1_000_000
# That a large answer waits for room: longer than the server keeps a client that reads nothing
WAIT_SECONDS = 30.0
# Of all bodies that arrive in several pieces, and of those without a key in a header
MAX_ARRIVING_BYTES, MAX_KEYLESS_BYTES = 256_000_000, 16_000_000
# Of bodies and decoded values of all requests that are being answered
MAX_INSIDE_BYTES = 1_000_000_000
# Smaller bodies are not counted: those of all permits take less than a quarter of that
HELD_BYTES = 16_384
# A body has the time of `--body-timeout`, and a second for each of these announced bytes: a phone's
# connection is ten times as fast
BODY_BYTES_A_SECOND = 100_000.0
# The time of a body without a key in a header
KEYLESS_SECONDS = 10.0
# In a body of JSON: lists, objects, and commas outside of texts. OpenAI takes as many tokens a
# request. The SDK of MCP reads a value in a microsecond, on the event loop of all clients.
MAX_VALUES, MAX_MCP_VALUES = 300_000, 10_000
# Backslashes of a body whose marks beyond that are looked at: more would take too long
MAX_ESCAPES = 2_000_000
# Of a body of MCP that stores nothing
MAX_MCP_BYTES = 200_000
# A block of memory that the decoder makes for a value, on average
BLOCK_BYTES = 80


def most_of_large(limit: int) -> int:
    """How much of a bound all large holders may hold together."""
    return limit - limit // SHARE_LEFT


class Bound:
    """Units that all holders hold together: at most `limit`. Large holders leave a share to small
    ones. `refusal`: makes the error at the bound; default: Overloaded. For one event loop."""

    def __init__(
        self,
        limit: int,
        refusal: Callable[[Bound], Exception] = lambda _: Overloaded(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = self.free = limit
        self.left = limit - most_of_large(limit)
        self.refusal, self.clock = refusal, clock
        # Holders that wait for their clients, and how long they still may
        self.waiting: dict[Holder, None] = {}
        self.patience_s = inf
        # Units that `room` waits for. The first one has the turn, the others queue for it.
        self.queued = 0
        self._turn, self._given_back = asyncio.Lock(), asyncio.Event()

    @property
    def units(self) -> int:
        """What is held; more than the limit if `give_back` has taken."""
        return self.limit - self.free

    def has_room(self, units: int, *, is_large: bool = False) -> bool:
        return units <= self.free - self.left * is_large

    def check(self) -> None:
        """Raises the refusal if nothing is free. Call it before any work for a request."""
        if self.free <= 0:
            raise self.refusal(self)

    def take(self, units: int, *, is_large: bool = False) -> None:
        """Raises the refusal, and has no effect then."""
        if units > self.free - self.left * is_large:
            raise self.refusal(self)
        self.free -= units

    def give_back(self, units: int) -> None:
        """Give units back; a negative number takes them, room or not."""
        self.free += units
        if self.queued:
            self._given_back.set()

    def fitting(self, units: int) -> int:
        """The units that a holder of `units` bytes counts for: one holder alone always fits."""
        return min(units, self.limit - self.left)

    async def room(self, units: int) -> int:
        """Wait, in order of arrival, until a large holder may take `units`; return what was taken,
        to be given back. Raises the refusal after `WAIT_SECONDS`, or at once if those that wait ask
        for the whole bound already."""
        units = self.fitting(units)
        if self.queued + units > self.limit:
            raise self.refusal(self)
        self.queued += units
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._turn:
                while not self.has_room(units, is_large=True):
                    self._given_back.clear()
                    await self._given_back.wait()
                self.free -= units
        except TimeoutError:
            raise self.refusal(self) from None
        finally:
            self.queued -= units
        return units

    def inside(self, units: int, *, is_large: bool = False) -> Holder:
        """A context that holds `units`. Raises the refusal on entry. A caller that carries enough
        takes none."""
        return Holder(self, units, is_large)

    @contextmanager
    def carrying(self, units: int) -> Iterator[None]:
        """A context in which these units need not be taken, also in tasks started inside."""
        before = _carried.set((self, units))
        try:
            yield
        finally:
            _carried.reset(before)

    def hurry(self, seconds: float) -> None:
        """From now on, wait no longer than this for any client."""
        self.patience_s = seconds
        soon = asyncio.get_running_loop().time() + seconds
        for holder in self.waiting:
            holder.expire(soon)

    def end_longest(self) -> Holder | None:
        """End the waiting holder of most units times seconds. None: there is none."""
        now = self.clock()
        longest = max(
            self.waiting, key=lambda holder: holder.units * (now - holder.since), default=None
        )
        if longest is not None:
            longest.is_ended = True
            longest.expire(0)
            longest.leave()
        return longest


_carried: ContextVar[tuple[Bound | None, int]] = ContextVar("carried_units", default=(None, 0))


@dataclass(eq=False, slots=True)
class Holder:
    """What one request, call or connection holds of a bound. As a context it takes what was
    `asked`, and gives all back."""

    bound: Bound
    asked: int = 0
    is_large: bool = False
    units: int = 0
    # While it waits for its client; True if the bound has ended that, not the time
    wait: asyncio.Timeout | None = None
    since: float = 0.0
    is_ended: bool = False

    def __enter__(self) -> Self:
        carrier, carried = _carried.get()
        if carrier is not self.bound or self.asked > carried:
            self.bound.take(self.asked, is_large=self.is_large)
            self.units = self.asked
        return self

    def __exit__(self, *_: object) -> None:
        # A call of `give_back` fewer for each request
        self.bound.free += self.units
        self.units = 0
        if self.bound.queued:
            self.bound.give_back(0)

    def leave(self, *_: object) -> None:
        """Give all back."""
        self.bound.waiting.pop(self, None)
        self.__exit__()

    def expire(self, when: float) -> None:
        """Wait until then at most. A wait that has just expired stays so."""
        if self.wait is not None and not self.wait.expired():
            self.wait.reschedule(min(when, self.wait.when() or inf))

    def add(self, units: int) -> None:
        """Hold `units` more, or fewer if negative, also without room."""
        self.units += units
        self.bound.give_back(-units)

    def take(self, units: int) -> None:
        """Take units; at the bound, in place of holders that wait for their clients. Raises the
        refusal if this one has held most for longest, or if no other waits."""
        is_large = self.units + units > SMALL_BYTES
        units = min(units, self.bound.fitting(self.units + units) - self.units)
        while units > 0 and not self.bound.has_room(units, is_large=is_large):
            if self.bound.end_longest() in (self, None):
                raise self.bound.refusal(self.bound)
        self.add(units)

    async def within(self, seconds: float, client: Awaitable[T]) -> T:
        """Wait for the client. Raises TimeoutError after `seconds`, and the refusal if another
        holder takes the place. Waits may be nested."""
        bound, outer = self.bound, self.wait
        seconds = min(seconds, bound.patience_s)
        if outer is None:
            self.since = bound.clock()
            bound.waiting[self] = None
        try:
            async with asyncio.timeout(seconds) as self.wait:
                return await client
        except TimeoutError:
            if self.is_ended:
                raise bound.refusal(bound) from None
            raise
        finally:
            self.wait = outer
            if outer is None:
                bound.waiting.pop(self, None)


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
            raise TimedOut(
                f"no answer within {deadlines.seconds:g} seconds (request-timeout): try again later"
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

    def within(self) -> AbstractContextManager[None]:
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


# Of a request of more inputs than a request may have
MAX_CHUNKS_AT_ONCE = 2
# 64 MB as float32, about three times as much as JSON: ten thousand vectors of 1,600
MAX_ANSWER_NUMBERS = 16_000_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a request of `inputs` inputs: at most `chunk` inputs a chunk, and `at_once`
    chunks at once. It holds `permits` permits from before the first chunk until after the last.
    `max_numbers`: in the answer.

    A request without a free permit is refused at once. A request of many inputs runs in several
    turns with the same permits, and a gRPC stream may have endless messages. A few of these could
    hold all permits for minutes, so they leave a share to requests of one turn, such as queries.
    """

    inputs: int
    chunk: int
    at_once: int
    permits: int
    max_numbers: float = inf
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
        available = most_of_large(permits)
        chunk = min(largest, available)
        at_once = min(MAX_CHUNKS_AT_ONCE, available // chunk)
        held = min(inputs, chunk * at_once)
        return cls(inputs, chunk, at_once, held, MAX_ANSWER_NUMBERS, held < inputs)

    def check(self, numbers: int) -> None:
        """Raises RequestRefused if the answer has more numbers than it may have."""
        if numbers > self.max_numbers:
            raise RequestRefused(
                f"the answer would hold more than {self.max_numbers} numbers: send fewer inputs at "
                "once"
            )

    def of_inputs(self, inputs: int) -> Self:
        """Return the same bounds of `inputs` inputs, each of which takes several permits."""
        return replace(self, inputs=inputs)

    def in_chunks(self, chunk: int) -> Self:
        """Return bounds with the same permits and another chunk size, for tasks whose inputs cost
        less than their permits."""
        return replace(self, chunk=chunk, at_once=MAX_CHUNKS_AT_ONCE)


MINUTE_S = 60
# Of the tokens that a key has used beyond its bound: a large request locks it out no longer
MAX_DEBT_MINUTES = 5


class Meter:
    """The tokens that a key may use: `limit` at once, and as many again in a minute. A request may
    use more than are left; the next ones wait until these are there again, or `MAX_DEBT_MINUTES`
    at most."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._left, self._read_at_s = float(limit), clock()

    def check(self) -> None:
        """Raises TokensUsed."""
        now_s = self._clock()
        self._left += (now_s - self._read_at_s) * self.limit / MINUTE_S
        self._left, self._read_at_s = min(self._left, self.limit), now_s
        if self._left < 1:
            raise TokensUsed(self.limit, ceil((1 - self._left) * MINUTE_S / self.limit))

    def spend(self, tokens: int) -> None:
        self._left = max(self._left - tokens, -self.limit * MAX_DEBT_MINUTES)


class Spending:
    """The tokens of one request. `count`: counts them; `meter`: bounds them."""

    def __init__(self, count: Callable[[int], object], meter: Meter | None) -> None:
        self._count, self._meter = count, meter
        self._has_begun = False

    def take(self, tokens: int) -> None:
        """Take the tokens that are about to be computed, also for a client that leaves. Raises
        TokensUsed if other requests of the key have used them since this one was let in; a request
        that has begun may end."""
        if self._meter is not None:
            if not self._has_begun:
                self._meter.check()
            self._meter.spend(tokens)
        self._has_begun = True
        self._count(tokens)


# Of the request or call, also in tasks that it starts; None: the server has no keys
SPENDING: ContextVar[Spending | None] = ContextVar("spending", default=None)
