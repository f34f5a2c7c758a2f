"""Work that may never end, on a thread of its own: loading a model, which may wait for a disk or a host that does not answer.

`asyncio.to_thread` would take one of the few threads that large answers are written on, and the process could not end before
the work does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """What `work` returns; raises what it raises. The process may end before it does; to cancel the caller does not stop it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[Any], object], value: Any) -> None:
        if not done.done():
            act(value)

    def run() -> None:
        try:
            ended = partial(settle, done.set_result, work(*arguments))
        except BaseException as error:  # whatever it is, the caller is told
            ended = partial(settle, done.set_exception, error)
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=run, name=f"aside-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return await done
