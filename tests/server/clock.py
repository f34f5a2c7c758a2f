"""A clock for the connections of a server in this process: its time stands still until a test moves it on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import uvicorn

from hybridtei.server.http.protocol import BoundedHttpProtocol


class SteppedClock:
    """The event loop as connections see it, but for its time."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[asyncio.TimerHandle] = []
        self._loop: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self)  # type: ignore[arg-type]
        self._timers.append(timer)
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args)

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """As loops are told; here nothing is cleared away before its time."""

    def advance(self, seconds: float) -> None:
        """Time moves on, and what is due by then is done when this returns. From any thread but the server's."""
        done: Future[None] = Future()
        self._loop.call_soon_threadsafe(self._move, seconds, done)
        done.result(60)

    def _move(self, seconds: float, done: Future[None]) -> None:
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.when() <= end]:
            first = min(due, key=asyncio.TimerHandle.when)
            self._timers.remove(first)
            self._now = max(self._now, first.when())
            if not first.cancelled():
                first._run()
        self._now = end
        done.set_result(None)

    def drive(self, settings: uvicorn.Config) -> None:
        """Have the connections of a server keep this time."""
        made = settings.http
        assert isinstance(made, partial)

        def protocol(**given: Any) -> ClockedProtocol:
            self._loop = asyncio.get_running_loop()
            return ClockedProtocol(**{**given, **made.keywords, "_loop": self})

        settings.http = protocol  # type: ignore[assignment]


class ClockedProtocol(BoundedHttpProtocol):
    """Tells what a test has to know before it moves the clock on: how much of what it sent was read."""

    bytes_read = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.bytes_read += len(data)
