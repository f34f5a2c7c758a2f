"""One bound of time for many pieces of work on an event loop, with one timer for all of them.

`asyncio.timeout` would make and cancel a timer for each request, which costs as much as tokenising a short text. Here all have
the same bound, so the one that began first is the first to be late, and a single timer waits for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from hybridtei.errors import TimedOut

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Running:
    """A task, by when it should be done, and how many wanted it cancelled before."""

    task: asyncio.Task[Any]
    deadline: float
    cancelling: int
    late: bool = False


class Deadlines:
    """`seconds` of `clock` for each piece of work; 0: as long as it likes. Used from one event loop's thread."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._running: dict[_Running, None] = {}  # who began first stands first
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Raises TimedOut, once it has been cancelled and is done with that."""
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
        """Nobody is late any more."""
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


LOOK_SECONDS = 1.0  # at most, between looks
LOOKS = 4  # within a bound, at least


class Watchdog:
    """Watches what runs in other threads, for `seconds` of `clock` each; 0: nothing."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watched: dict[int, tuple[float, Callable[[], object]]] = {}  # the oldest first
        self._next = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        if self._seconds:
            self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._closed.set()

    def begin(self, overdue: Callable[[], object]) -> int:
        """Something begins; the number that `end` wants. `overdue`: called from the watchdog's thread, at most once."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._watched[number] = (self._clock() + self._seconds, overdue)
            return number

    def end(self, number: int) -> None:
        """It has ended; no call begins from now on."""
        with self._lock:
            self._watched.pop(number, None)

    def _watch(self) -> None:
        while not self._closed.wait(min(LOOK_SECONDS, self._seconds / LOOKS)):
            now = self._clock()
            with self._lock:
                late = [number for number, (deadline, _) in self._watched.items() if deadline <= now]
                calls = [self._watched.pop(number)[1] for number in late]
            for call in calls:
                call()
