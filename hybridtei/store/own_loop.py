"""An event loop in a thread of its own: for plain functions that wait for coroutines, wherever they are called from.

Knows no coroutine. The surprise: `asyncio.run` refuses to work in a thread whose loop runs already, as it does in every cell of
a notebook.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnLoop:
    """Begins with the first call and lasts until it is closed, so that what is opened in one call serves the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, or raises. Interrupted (Ctrl-C), it is cancelled. The caller's thread waits meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """What still runs is cancelled, and the thread has ended."""
        with self._lock:
            if self._loop is not None and self._stop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()
            self._loop = self._stop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                ready = threading.Event()
                self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),), name="own-loop", daemon=True)
                self._thread.start()
                ready.wait()
            assert self._loop is not None
            return self._loop

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        stop = self._stop
        ready.set()
        await stop.wait()
