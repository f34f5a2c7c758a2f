"""The process of the embedded engine, seen from outside; and an event loop in a thread, for callers that have none.

Imports no qdrant-client, which takes half a second: a command starts the process first, and itself meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hybridtei.errors import StoreAtCapacity, StoreError, StoreUnavailable
from hybridtei.system import machine
from hybridtei.system.frames import HEADER, frame, unframe

START_S = 60.0
CLOSE_S = 120.0
MAX_WAITING = 1000  # calls, however fast they are: each holds its arguments
NEWEST_SHARE = 0.1  # weight of the newest call in a mean duration


@dataclass(eq=False, slots=True)
class _Call:
    """A call as a frame, and the future of its answer."""

    name: str
    message: bytes
    answer: asyncio.Future[Any]


class ProcessClient:
    """The engine's process and the connection to it. Used from one event loop."""

    command: ClassVar[tuple[str, ...]] = ("-m", "hybridtei.store.embedded_folder")

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._folder = os.path.abspath(path)  # the process works elsewhere
        self._clock = clock
        self._starting: asyncio.Task[None] | None = None
        self._waiting: dict[_Call, None] = {}  # calls whose callers wait, in their order, the sent one included
        self._sent: _Call | None = None  # the call that the process executes, whether or not its caller still waits
        self._sent_s = 0.0
        self._mean_s: dict[str, float] = {}  # duration of calls of this name
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return self._process.pid if self._process is not None and self._writer is not None else None

    async def ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The process's answer. Raises StoreError with the process's words, StoreUnavailable if it dies or takes too long, and
        StoreAtCapacity at once if so many calls wait that this one would not be answered within `timeout_s`."""
        self._admit(timeout_s)
        waiting = _Call(call, frame([call, arguments]), asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        try:
            await self._started()  # which has a bound of its own
            async with asyncio.timeout(timeout_s):
                self._send_next()
                return await waiting.answer
        except TimeoutError as error:
            raise StoreUnavailable(
                f"{self.path}: the embedded Qdrant engine has not answered for {timeout_s:g} s: it may be building an index; "
                "try later, or raise `qdrant_timeout`"
            ) from error
        finally:
            del self._waiting[waiting]

    def _admit(self, timeout_s: float | None) -> None:
        """Raises StoreAtCapacity where the calls that wait already will take longer than the bound of this one."""
        waiting = len(self._waiting)
        if timeout_s is None or waiting == 0:
            return
        expected_s = sum(self._mean_s.get(call.name, 0.0) for call in self._waiting)
        if waiting >= MAX_WAITING or expected_s > timeout_s:
            raise StoreAtCapacity(
                f"{self.path}: {waiting} calls wait for the embedded Qdrant engine, about {expected_s:.1f} s of work; one more "
                f"would not be answered within {timeout_s:g} s (qdrant-timeout): try again later"
            )

    def _send_next(self) -> None:
        """Send the call that has waited longest, unless the process executes one."""
        if self._sent is not None or self._writer is None:
            return
        self._sent = next((call for call in self._waiting if not call.answer.done()), None)
        if self._sent is not None:
            self._sent_s = self._clock()
            self._writer.write(self._sent.message)

    def _answered(self, word: str, answer: Any) -> None:
        """Resolve the sent call's future, if its caller still waits, and send the next."""
        call, self._sent = self._sent, None
        assert call is not None
        took_s = self._clock() - self._sent_s
        mean_s = self._mean_s.get(call.name, took_s)
        self._mean_s[call.name] = mean_s + (took_s - mean_s) * NEWEST_SHARE
        if not call.answer.done():
            if word == "done":
                call.answer.set_result(answer)
            else:
                call.answer.set_exception(StoreError(f"embedded Qdrant: {answer}"))
        self._send_next()

    async def close(self) -> None:
        """Waits for the answers of all calls; the process flushes and ends."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        writer, process = self._writer, self._process
        if writer is None or process is None:
            return
        if self._waiting:
            await asyncio.wait([call.answer for call in self._waiting], timeout=CLOSE_S)
        writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._listening is not None:
            await self._listening

    async def _started(self) -> None:
        """Starts the process unless it runs. Callers share one start, which a cancelled caller does not stop."""
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed")
        if self._writer is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
                self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())  # so retrieved
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *machine.python_command(*self.command, self._folder, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                cwd=machine.NEUTRAL,
                env={**machine.child_environment(), "RUST_BACKTRACE": "0"},
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
            word = "dead"
            message = f"{self.path}: the process of the embedded Qdrant engine ended, or hung, at its start: {error}"
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
        """Resolves calls until the connection ends; then fails the calls that still wait."""
        try:
            while True:
                self._answered(*await _receive(reader))
        except (EOFError, ConnectionError):
            pass
        finally:
            self._writer = self._sent = None
            ended = f"{self.path}: the process of the embedded Qdrant engine has ended; it is started again when asked"
            for call in self._waiting:
                if not call.answer.done():
                    call.answer.set_exception(StoreUnavailable(ended))
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                if not self._closed:
                    process.kill()
            await process.wait()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return unframe(await reader.readexactly(length))


T = TypeVar("T")


class OwnLoop:
    """An event loop in a thread, from the first call until `close`: connections opened in one call serve the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns or raises what the coroutine does, and blocks until then. Ctrl-C cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begins the coroutine and returns; what it returns or raises is dropped."""
        asyncio.run_coroutine_threadsafe(work, self._started()).add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        with self._lock:
            if self._loop is not None and self._stop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()
            self._loop = self._stop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                ready = threading.Event()
                self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),), name="own-loop", daemon=True)
                self._thread.start()
                ready.wait()
            assert self._loop is not None
            return self._loop

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        stop = self._stop
        ready.set()
        await stop.wait()
