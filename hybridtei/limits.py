"""The owner of limits: `Bound` counts what all holders of something hold together.

Units are what is really held: bytes that have arrived, permits, open calls. Nothing else compares
such a count with its limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import ceil

from hybridtei.errors import TokensUsed

# A quarter of a bound is not given to large holders
SHARE_LEFT = 4
# Bytes of a body; the share that is left is for smaller ones
SMALL_BYTES = 1_000_000
# Of all bodies that arrive in several pieces, and of those without a key in a header
MAX_ARRIVING_BYTES, MAX_KEYLESS_BYTES = 256_000_000, 16_000_000
# Of bodies and decoded values of all requests that are being answered
MAX_INSIDE_BYTES = 1_000_000_000
# Smaller bodies are not counted: those of all permits take less than a quarter of that
HELD_BYTES = 16_384
# A body has the time of `--body-timeout`, and a second for each of these announced bytes: a phone's
# connection is ten times as fast
BODY_BYTES_A_SECOND = 100_000
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


class AtBound(Exception):
    """A bound has no room. `limit`: the bound's."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class Bound:
    """Units that all holders hold together: at most `limit`. The last quarter is for holders of at
    most `small` units, if given. For one event loop."""

    def __init__(
        self, limit: int, small: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self.units = limit, 0
        self._small, self._clock = small, clock
        self._arriving: dict[Arriving, None] = {}

    def has_room(self, units: int, held: int = 0) -> bool:
        """True if a holder of `held` units may take `units` more. Nothing always fits, and one
        holder alone takes what it likes."""
        limit = self.limit
        if self._small is not None and held + units > self._small:
            limit -= limit // SHARE_LEFT
        return self.units + units <= limit or units == 0 or self.units == held

    def take(self, units: int, held: int = 0) -> None:
        """Raises AtBound."""
        if not self.has_room(units, held):
            raise AtBound(self.limit)
        self.units += units

    def give_back(self, units: int) -> None:
        self.units -= units

    @contextmanager
    def arriving(self, wait: asyncio.Timeout) -> Iterator[Arriving]:
        """A holder whose units arrive while it waits for its client. At the bound, that holder ends
        which has held most for longest: its `wait` expires."""
        holder = Arriving(self, wait, self._clock())
        self._arriving[holder] = None
        try:
            yield holder
        finally:
            holder.leave()

    def end_longest(self) -> Arriving | None:
        """End the holder of most units times seconds. None: there is none."""
        now = self._clock()
        longest = max(
            self._arriving,
            key=lambda holder: holder.units * (now - holder.since),
            default=None,
        )
        if longest is not None:
            longest.is_ended = True
            longest.wait.reschedule(asyncio.get_running_loop().time())
            longest.leave()
        return longest


class Arriving:
    """One holder of a bound that waits for its client."""

    def __init__(self, bound: Bound, wait: asyncio.Timeout, since: float) -> None:
        self.wait, self.since, self.units = wait, since, 0
        # True if the bound has ended it, not the time
        self.is_ended = False
        self._bound = bound

    def take(self, units: int) -> None:
        """Take units; at the bound, in place of others. Raises AtBound if this holder has held most
        for longest."""
        while not self._bound.has_room(units, self.units):
            if self._bound.end_longest() in (self, None):
                raise AtBound(self._bound.limit)
        self._bound.units += units
        self.units += units

    def leave(self) -> None:
        """Give all units back."""
        self._bound.units -= self.units
        self.units = 0
        self._bound._arriving.pop(self, None)


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
