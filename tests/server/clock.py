"""A clock for the connections of a server in this process: its time stands still until a test moves
it on."""

import asyncio
from concurrent.futures import Future
from functools import partial

from hybridtei.server.http.protocol import BoundedHttpProtocol


class SteppedClock:
    """The event loop as connections see it, but for its time."""

    def __init__(self):
        self._now = 1000.0
        self._timers = []
        self._loop = None

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def time(self):
        return self._now

    def call_at(self, when, callback, *args):
        timer = asyncio.TimerHandle(when, callback, args, self)
        self._timers.append(timer)
        return timer

    def call_later(self, delay, callback, *args):
        return self.call_at(self._now + delay, callback, *args)

    def _timer_handle_cancelled(self, timer):
        """As loops are told; here nothing is cleared away before its time."""

    def advance(self, seconds):
        """Time moves on, and what is due by then is done when this returns. From any thread but the
        server's."""
        done = Future()
        self._loop.call_soon_threadsafe(self._move, seconds, done)
        done.result(60)

    def _move(self, seconds, done):
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.when() <= end]:
            first = min(due, key=asyncio.TimerHandle.when)
            self._timers.remove(first)
            self._now = max(self._now, first.when())
            if not first.cancelled():
                first._run()
        self._now = end
        done.set_result(None)

    def drive(self, settings):
        """Have the connections of a server keep this time."""
        made = settings.http
        assert isinstance(made, partial)

        def protocol(**given):
            self._loop = asyncio.get_running_loop()
            return ClockedProtocol(**{**given, **made.keywords, "_loop": self})

        settings.http = protocol


class ClockedProtocol(BoundedHttpProtocol):
    """Tells what a test has to know before it moves the clock on: how much of what it sent was
    read."""

    bytes_read = 0

    def data_received(self, data):
        super().data_received(data)
        self.bytes_read += len(data)
