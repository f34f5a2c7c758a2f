"""This side of the process that owns an embedded engine: started when asked, asked by many at once, started again if it dies.

The surprise: a call that waits when the owner dies may or may not have been done; it ends in StoreUnavailable, and since points
carry ids that never change, asking again is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from typing import Any, ClassVar

from hybridtei import child_process
from hybridtei.errors import StoreError, StoreUnavailable
from hybridtei.qdrant.edge_frames import HEADER, frame, unframe

START_S = 60.0
CLOSE_S = 120.0


class Owner:
    """The process and the connection to it. Used from one event loop."""

    command: ClassVar[tuple[str, ...]] = ("-m", "hybridtei.qdrant.edge_process")

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = os.path.abspath(path)  # the process works elsewhere
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return self._process.pid if self._process is not None and self._writer is not None else None

    async def ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The answer. Raises StoreError as the owner words it, StoreUnavailable if it dies or takes too long."""
        writer = await self._started()
        number = next(self._numbers)
        message = frame([number, call, arguments])
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(message)
                with contextlib.suppress(ConnectionError):  # then the listener says so
                    await writer.drain()
                return await future
        except TimeoutError as error:
            raise StoreUnavailable(
                f"{self.path}: the embedded Qdrant engine has not answered for {timeout_s:g} s: it may be building an index; "
                "try later, or raise `qdrant_timeout`"
            ) from error
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """The owner answers what it was asked, flushes and ends."""
        self._closed = True
        async with self._starting:
            writer, process = self._writer, self._process
            if writer is None or process is None:
                return
            if self._waiting:
                await asyncio.wait(list(self._waiting.values()), timeout=CLOSE_S)
            writer.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            if self._listening is not None:
                await self._listening

    async def _started(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._closed:
                raise StoreError(f"{self.path}: the store is closed")
            if self._writer is None:
                await self._start()
            assert self._writer is not None
            return self._writer

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *child_process.command(*self.command, self._folder, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                cwd=child_process.NEUTRAL,
                env={**child_process.environment(), "RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            ours.close()
            raise StoreUnavailable(f"{self.path}: the process of the embedded Qdrant engine does not start: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_S):
                word, message = await _receive(reader)
        except (TimeoutError, EOFError, ConnectionError) as error:
            word, message = (
                "dead",
                f"{self.path}: the process of the embedded Qdrant engine ended, or hung, at its start: {error}",
            )
        if word != "ready":
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise StoreError(str(message)) if word == "refused" else StoreUnavailable(str(message))
        self._process, self._writer = process, writer
        self._listening = asyncio.create_task(self._listen(reader, writer, process))

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process
    ) -> None:
        """Hands answers to who asked, until there are no more; then fails who still waits."""
        try:
            while True:
                number, word, answer = await _receive(reader)
                future = self._waiting.get(number)
                if future is None or future.done():
                    continue
                if word == "done":
                    future.set_result(answer)
                else:
                    future.set_exception(StoreError(f"embedded Qdrant: {answer}"))
        except (EOFError, ConnectionError):
            pass
        finally:
            self._writer = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(
                        StoreUnavailable(
                            f"{self.path}: the process of the embedded Qdrant engine has ended; it is started again when asked"
                        )
                    )
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                if not self._closed:
                    process.kill()
            await process.wait()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return unframe(await reader.readexactly(length))
