"""Threads whose long work lets short work pass: a client's short text does not wait until another
client's megabytes are tokenised."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_LOCAL = threading.local()


class Turns:
    """`workers` threads. Work runs in order of arrival, but short work also at each `give_way` of
    long work. Thread-safe."""

    def __init__(self, workers: int, name: str) -> None:
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        # Pieces of long work that wait or run; while there are none, short work needs no turn
        self.long = 0
        self._lock = threading.Lock()
        self._short: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[[], T], *, is_short: bool) -> Future[T]:
        """Queue `work`. Cancelling the future cancels work that has not begun."""
        if not is_short:
            with self._lock:
                self.long += 1
            long = self.threads.submit(self._run_long, work)
            long.add_done_callback(self._end_long)
            return long
        future: Future[T] = Future()
        self._short.append((future, work))
        self.threads.submit(self.run_short)
        return future

    def run_short(self) -> None:
        """Run the short work that has waited longest, if long work has not run it already."""
        try:
            future, work = self._short.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def run_waiting(self) -> None:
        """Run the short work that waits now."""
        for _ in range(len(self._short)):
            self.run_short()

    def shutdown(self) -> None:
        """Take no more work."""
        self.threads.shutdown(wait=False)

    def _end_long(self, _: object) -> None:
        with self._lock:
            self.long -= 1

    def _run_long(self, work: Callable[[], T]) -> T:
        _LOCAL.turns = self
        try:
            return work()
        finally:
            _LOCAL.turns = None


def give_way() -> None:
    """Called by long work between two of its portions: run the short work that waits."""
    turns = getattr(_LOCAL, "turns", None)
    if turns is not None:
        # Short work runs whole
        _LOCAL.turns = None
        turns.run_waiting()
        _LOCAL.turns = turns
