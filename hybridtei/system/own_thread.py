"""Blocking work that coroutines await, in threads of its own.

The work learns when nothing awaits it any more: a cancelled coroutine cannot stop a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from hybridtei.system.forks import renew_in_children

T = TypeVar("T")
# Of other work
_NEVER = threading.Event()
_unawaited: ContextVar[threading.Event] = ContextVar("unawaited")


def unawaited() -> threading.Event:
    """Return the event that is set when nothing awaits the calling thread's work any more."""
    return _unawaited.get(_NEVER)


def check_awaited() -> None:
    """Raises CancelledError if nothing awaits the calling thread's work any more."""
    if unawaited().is_set():
        raise CancelledError


class OwnThreads:
    """At most `count` threads, which start with work. A forked process starts its own."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._count = name, count
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Forget the threads and the work of the parent process."""
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread, when one is free."""
        return await awaited(self._pool.submit, work)


async def awaited(submit: Callable[[Callable[[], T]], Future[T]], work: Callable[[], T]) -> T:
    """Await `work`, which `submit` gives to a thread. If this coroutine is cancelled, work that
    waits is never called, and work that runs sees it by `unawaited`."""
    left, context = threading.Event(), copy_context()
    context.run(_unawaited.set, left)
    try:
        return await asyncio.wrap_future(submit(partial(context.run, work)))
    finally:
        left.set()
