"""A stream whose messages are answered beside each other, and whose answers are sent in the order of the messages."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from hybridtei.server.http.connection import SMALL_BYTES, Unsent

UNSENT_BYTES = 16_000_000  # of answers that are ready and wait for the client, or for an earlier one
DEFAULT_PARALLEL = 1024

Answer = Callable[[bytes], Coroutine[Any, Any, bytes]]
Send = Callable[[bytes], Awaitable[None]]
Enter = Callable[[], Awaitable[Callable[[], None]]]
Estimate = Callable[[int], int]  # bytes of a message -> bytes of its answer, about


def parallel_requests() -> int:
    """Most messages of one stream in the works: TEI's variable GRPC_MAX_PARALLEL_STREAM_REQUESTS."""
    given = os.environ.get("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "")
    return max(int(given), 1) if given.isdecimal() else DEFAULT_PARALLEL


class InOrder:
    """One stream. `enter`: waits for leave to begin with a message, and gives what is to be called when it is done. `unsent`:
    counts the answers of all clients."""

    def __init__(
        self,
        answer: Answer,
        enter: Enter,
        unsent: Unsent,
        *,
        most: int,
        estimate: Estimate = lambda _: 0,
        unsent_bytes: int = UNSENT_BYTES,
    ) -> None:
        self._answer = answer
        self._enter = enter
        self._estimate = estimate
        self._of_all = unsent
        self._most = most
        self._most_unsent = unsent_bytes
        self._running: deque[asyncio.Task[bytes]] = deque()
        self._unsent = 0  # bytes of this stream that `_of_all` counts
        self._ended = False
        self._room, self._news = asyncio.Event(), asyncio.Event()

    async def run(self, requests: AsyncIterator[bytes], send: Send) -> None:
        """Until all is answered. Raises what the first message by place raises; nothing runs on then, or if cancelled. Raises
        AnswersUnsent for a message that comes at the bound of all, while this stream holds nothing."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while await self._has_more():
                body = await self._running[0]
                await send(body)
                self._running.popleft()
                self._count(-len(body))
                self._room.set()
            await reader
        finally:
            left = [reader, *self._running]
            for task in left:
                task.cancel()
            self._count(-self._unsent)  # now: gRPC cancels a call twice, and the second one may end what is awaited here
            await asyncio.gather(*left, return_exceptions=True)

    def _count(self, size: int) -> None:
        self._unsent += size
        self._of_all.add(size)

    async def _has_more(self) -> bool:
        while not self._running and not self._ended:
            self._news.clear()
            await self._news.wait()
        return bool(self._running)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                while self._running and self._is_full:
                    self._room.clear()
                    await self._room.wait()
                reserved = await self._reserve(len(data))
                self._begin(data, reserved, await self._enter())
        finally:
            self._ended = True
            self._news.set()

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._most or self._unsent >= self._most_unsent or self._of_all.is_full

    async def _reserve(self, size: int) -> int:
        """How many bytes are counted for the answer to a message of `size` bytes, until it is there."""
        self._of_all.check()
        estimate = self._estimate(size)
        if estimate <= SMALL_BYTES:
            return 0
        reserved = await self._of_all.room(estimate)
        self._unsent += reserved
        return reserved

    def _begin(self, data: bytes, reserved: int, leave: Callable[[], None]) -> None:
        task = asyncio.ensure_future(self._one(data, reserved))
        task.add_done_callback(lambda _: leave())  # also if it is cancelled before it began
        self._running.append(task)
        self._news.set()

    async def _one(self, data: bytes, reserved: int) -> bytes:
        body = await self._answer(data)
        self._count(len(body) - reserved)
        return body
