"""A stream of requests -> a stream of answers, in the same order; many are in the works at a time, and never too many.

A message is read when there is room for it and a permit, so a stream waits in line once, however many messages it has yet to
send: streams take turns. A client that does not read its answers stops being read, too.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

UNSENT_BYTES = 16_000_000  # of answers that are ready and wait for the client, or for an earlier one
DEFAULT_PARALLEL = 1024

Answer = Callable[[bytes], Coroutine[Any, Any, bytes]]
Send = Callable[[bytes], Awaitable[None]]
Enter = Callable[[], Awaitable[Callable[[], None]]]


def parallel_requests() -> int:
    """Most messages of one stream in the works: TEI's variable GRPC_MAX_PARALLEL_STREAM_REQUESTS."""
    given = os.environ.get("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "")
    return max(int(given), 1) if given.isdecimal() else DEFAULT_PARALLEL


class InOrder:
    """One stream. `enter`: waits for leave to begin with a message, and gives what is to be called when it is done."""

    def __init__(self, answer: Answer, enter: Enter, *, most: int, unsent_bytes: int = UNSENT_BYTES) -> None:
        self._answer = answer
        self._enter = enter
        self._most = most
        self._most_unsent = unsent_bytes
        self._running: deque[asyncio.Task[bytes]] = deque()
        self._unsent = 0
        self._ended = False
        self._room, self._news = asyncio.Event(), asyncio.Event()

    async def run(self, requests: AsyncIterator[bytes], send: Send) -> None:
        """Until all is answered. Raises what the first message by place raises; nothing runs on then, or if cancelled."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while await self._has_more():
                body = await self._running[0]
                await send(body)
                self._running.popleft()
                self._unsent -= len(body)
                self._room.set()
            await reader
        finally:
            left = [reader, *self._running]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _has_more(self) -> bool:
        while not self._running and not self._ended:
            self._news.clear()
            await self._news.wait()
        return bool(self._running)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                while len(self._running) >= self._most or self._unsent >= self._most_unsent:
                    self._room.clear()
                    await self._room.wait()
                self._begin(data, await self._enter())
        finally:
            self._ended = True
            self._news.set()

    def _begin(self, data: bytes, leave: Callable[[], None]) -> None:
        task = asyncio.ensure_future(self._one(data))
        task.add_done_callback(lambda _: leave())  # also if it is cancelled before it began
        self._running.append(task)
        self._news.set()

    async def _one(self, data: bytes) -> bytes:
        body = await self._answer(data)
        self._unsent += len(body)
        return body
