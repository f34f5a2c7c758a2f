"""An event loop in a thread, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnLoop:
    """An event loop in a thread until `close`: connections opened in one call serve the next."""

    def __init__(self) -> None:
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="own-loop", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it runs what it is given."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns or raises what the coroutine does, and blocks until then. Ctrl-C cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begins the coroutine and returns; what it returns or raises is dropped."""
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        if self.is_open:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
