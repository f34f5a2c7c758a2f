"""Coroutines that run without their caller: in an event loop of a thread, or as tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from hybridtei.system.forks import leave_to_parent, renew_in_children

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
    """An event loop that runs in a thread from the first call until `close`, so that later calls
    use the connections of earlier ones. A forked process starts its own."""

    def __init__(self) -> None:
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.renew()
        renew_in_children(self)

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return not self._is_closed

    def renew(self) -> None:
        """Leave the loop to the parent process."""
        leave_to_parent(self._loop)
        self._loop, self._starting = None, threading.Lock()

    def _started(self) -> asyncio.AbstractEventLoop:
        """The loop, which runs. Raises RuntimeError after `close`."""
        with self._starting:
            if self._is_closed:
                raise RuntimeError("it is closed: make another")
            if self._loop is None:
                self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
                self._thread = threading.Thread(
                    target=_serve,
                    args=(self._loop, self._ended),
                    name="own-loop",
                    daemon=True,
                )
                self._thread.start()
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and block until its result or error. Ctrl-C cancels the coroutine."""
        future = self._submitted(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine without waiting. Its result or error is dropped."""
        self._submitted(work).add_done_callback(read_error)

    def _submitted(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._started())
        except RuntimeError:
            work.close()
            raise

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        with self._starting:
            self._is_closed = True
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()


def _serve(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(ended.wait())
