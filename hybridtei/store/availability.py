"""Whether a Qdrant server is there, for callers who do not wait until it is: searches of the HTTP server.

While it is known to be away, a call is refused at once; after a pause one call tries again for all. The surprise: a call that
takes long says nothing, it may be a large search. So something light is asked beside it, and only where that is not answered
either is the server away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hybridtei.errors import StoreAway, StoreError

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0
CHECK_AFTER_S, CHECK_S = 1.0, 0.8  # who asks a server that hangs is told so after their sum


class Availability:
    """Of one server; used from one event loop. `check`: asks it something light."""

    def __init__(
        self,
        check: Callable[[], Awaitable[object]],
        *,
        clock: Callable[[], float] = time.monotonic,
        check_after_s: float = CHECK_AFTER_S,
        check_s: float = CHECK_S,
    ) -> None:
        self._check = check
        self._clock = clock
        self._check_after_s, self._check_s = check_after_s, check_s
        self._checking: asyncio.Task[None] | None = None
        self._away: StoreAway | None = None
        self._noted_s = 0.0
        self._pause_s = 0.0
        self._resume_s = 0.0

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What the attempt gives. Raises StoreAway, at once where that is known, and what the attempt raises."""
        began_s = self._clock()
        self._refuse(began_s)
        running = asyncio.ensure_future(attempt())
        try:
            while not (await asyncio.wait([running], timeout=self._check_after_s))[0]:
                await self._checked()
            result = running.result()
        except StoreAway as error:
            self._note(error, began_s)
            raise
        except StoreError:
            self._away = None  # it answers
            raise
        finally:
            running.cancel()
        self._away = None
        return result

    def _refuse(self, now_s: float) -> None:
        """Raises StoreAway, but for the one call that tries again when its time has come."""
        if self._away is None:
            self._pause_s = 0.0
        elif now_s < self._resume_s:
            raise StoreAway(str(self._away))
        else:
            self._resume_s = now_s + self._check_after_s + self._check_s

    def _note(self, error: StoreAway, began_s: float) -> None:
        """The server is away. Calls that were under way together are one failure."""
        if self._away is not None and began_s <= self._noted_s:
            return
        self._away, self._noted_s = error, self._clock()
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._resume_s = self._noted_s + self._pause_s

    async def _checked(self) -> None:
        """One check for all calls that take long. Raises StoreAway."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_once())
            self._checking.add_done_callback(lambda check: check.cancelled() or check.exception())  # seen, if by nobody else
        await asyncio.shield(self._checking)

    async def _check_once(self) -> None:
        try:
            async with asyncio.timeout(self._check_s):
                await self._check()
        except TimeoutError as error:
            waited_s = self._check_after_s + self._check_s
            raise StoreAway(
                f"the Qdrant server has answered nothing for {waited_s:g} s: is it running, or overloaded?"
            ) from error
        except StoreAway:
            raise
        except StoreError:
            pass  # that is an answer, too
