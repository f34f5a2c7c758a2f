"""A bidirectional stream: messages are worked on in parallel, and answers are sent in the order of the messages."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from hybridtei.server.http.connection import SMALL_BYTES, Unsent

MAX_UNSENT_BYTES = 16_000_000  # of finished answers that wait for the client, or for an earlier answer
DEFAULT_PARALLEL = 1024

Answer = Callable[[bytes], Coroutine[Any, Any, bytes]]
Send = Callable[[bytes], Awaitable[None]]
Enter = Callable[[], Awaitable[Callable[[], None]]]
Estimate = Callable[[int], int]  # bytes of a message -> bytes of its answer, about


def parallel_requests() -> int:
    """Return the max messages of one stream that are worked on: TEI's variable GRPC_MAX_PARALLEL_STREAM_REQUESTS."""
    text = os.environ.get("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "")
    return max(int(text), 1) if text.isdecimal() else DEFAULT_PARALLEL


class InOrder:
    """One stream. `enter` waits for a permit and returns what releases it. `unsent` counts the answers of all clients."""

    def __init__(
        self,
        answer: Answer,
        enter: Enter,
        unsent: Unsent,
        *,
        max_tasks: int,
        estimate: Estimate = lambda _: 0,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._answer = answer
        self._enter = enter
        self._estimate = estimate
        self._unsent_of_all = unsent
        self._max_tasks = max_tasks
        self._max_unsent = max_unsent_bytes
        self._tasks: deque[asyncio.Task[bytes]] = deque()
        self._unsent = 0  # bytes of this stream that `_unsent_of_all` counts
        self._ended = False
        self._has_room, self._has_news = asyncio.Event(), asyncio.Event()

    async def run(self, requests: AsyncIterator[bytes], send: Send) -> None:
        """Answer every message. Raises what the first message by place raises, and AnswersUnsent for a message that comes while
        all clients' answers are at their bound and this stream holds none. No task outlives it."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while await self._has_more():
                body = await self._tasks[0]
                await send(body)
                self._tasks.popleft()
                self._count(-len(body))
                self._has_room.set()
            await reader
        finally:
            left = [reader, *self._tasks]
            for task in left:
                task.cancel()
            self._count(-self._unsent)  # before the await: gRPC cancels a call twice, and the second cancellation may end it
            await asyncio.gather(*left, return_exceptions=True)

    def _count(self, size: int) -> None:
        self._unsent += size
        self._unsent_of_all.add(size)

    async def _has_more(self) -> bool:
        while not self._tasks and not self._ended:
            self._has_news.clear()
            await self._has_news.wait()
        return bool(self._tasks)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                while self._tasks and self._is_full:
                    self._has_room.clear()
                    await self._has_room.wait()
                reserved = await self._reserve(len(data))
                self._start(data, reserved, await self._enter())
        finally:
            self._ended = True
            self._has_news.set()

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) >= self._max_tasks or self._unsent >= self._max_unsent or self._unsent_of_all.is_full

    async def _reserve(self, size: int) -> int:
        """Count the estimated answer to a message of `size` bytes as unsent; return the bytes counted."""
        self._unsent_of_all.check()
        estimate = self._estimate(size)
        if estimate <= SMALL_BYTES:
            return 0
        reserved = await self._unsent_of_all.room(estimate)
        self._unsent += reserved
        return reserved

    def _start(self, data: bytes, reserved: int, release: Callable[[], None]) -> None:
        task = asyncio.ensure_future(self._run(data, reserved))
        task.add_done_callback(lambda _: release())  # also if it is cancelled before it begins
        self._tasks.append(task)
        self._has_news.set()

    async def _run(self, data: bytes, reserved: int) -> bytes:
        body = await self._answer(data)
        self._count(len(body) - reserved)
        return body
