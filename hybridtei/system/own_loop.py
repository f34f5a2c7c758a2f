"""Coroutines that run without their caller: in an event loop of a thread, or as tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def read_error(done: Any) -> object:
    """A callback that reads a future's error, if any: asyncio logs an error that nothing has
    read."""
    return done.cancelled() or done.exception()


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that continues without its caller, and then fails silently."""
    task = asyncio.create_task(work)
    task.add_done_callback(read_error)
    return task


class OwnLoop:
    """An event loop that runs in a thread until `close`, so that later calls use the connections of
    earlier ones."""

    def __init__(self) -> None:
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="own-loop", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """True while the loop runs."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and block until its result or error. Ctrl-C cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine without waiting. Its result or error is dropped."""
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(read_error)

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        if self.is_open:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
