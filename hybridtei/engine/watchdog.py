"""Forward passes that take too long are noticed by a thread of its own: the lane that runs one cannot look at a clock.

Knows no batch and no model: a pass is something that began, with a bound, and whoever watches is called once it is reached.
A pass cannot be interrupted; what can be done is to tell those who wait, and everybody who asks for health. It looks now and
then rather than being woken for each pass, which would cost every pass a change of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

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
