"""Answers that wait for clients to read them, of all connections of a process together.

An answer can be hundreds of times its request, and stays in memory until it is read. Above a bound no large answer is encoded:
it waits for its turn, and is refused if it waits too long. A quarter is left to small answers, so that a query is still
answered while clients that read nothing hold the rest; where these fill that, too, requests are refused before any work.
"""

from __future__ import annotations

import asyncio
from collections import deque

from hybridtei.errors import AnswersUnsent

SMALL_BYTES = 1_000_000  # an answer of no more does not wait
SHARE_LEFT = 4  # to small answers, one byte of so many
WAIT_SECONDS = 30.0  # longer than a client that reads nothing is kept


class Unsent:
    """How many `bytes` of answers are encoded, or about to be, and not yet taken by the system. For one event loop."""

    def __init__(self, limit: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.bytes = 0
        self._limit = limit
        self._large_limit = limit - limit // SHARE_LEFT
        self._wait_seconds = wait_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._limit

    def check(self) -> None:
        """To be called before any work for a request. Raises AnswersUnsent at the bound."""
        if self.is_full:
            raise self._refusal()

    def add(self, size: int) -> None:
        """Count `size` bytes more, or fewer where it is negative."""
        self.bytes += size
        if size < 0 and self._waiting:
            self._serve()

    async def room(self, size: int) -> int:
        """Wait until an answer of about `size` bytes may be encoded, in order of arrival.

        Returns how many bytes were counted for it, which the caller has to take back. An answer of more than all is let in
        alone. Raises AnswersUnsent after `wait_seconds`, or at once if as much as the bound waits already.
        """
        size = min(size, self._large_limit)
        if self._waiting_bytes + size > self._limit:
            raise self._refusal()
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        self._waiting_bytes += size
        self._serve()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._waiting_bytes -= size
                self._serve()
            else:
                self.add(-size)  # its turn came in the same moment
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise
        return size

    def _serve(self) -> None:
        while self._waiting and self.bytes + self._waiting[0][0] <= self._large_limit:
            size, turn = self._waiting.popleft()
            self._waiting_bytes -= size
            self.bytes += size
            if not turn.done():
                turn.set_result(None)

    def _refusal(self) -> AnswersUnsent:
        return AnswersUnsent(
            f"{self.bytes} bytes of answers wait for clients that do not read them, {self._limit} are allowed "
            "(max-unsent-bytes): try again later"
        )
