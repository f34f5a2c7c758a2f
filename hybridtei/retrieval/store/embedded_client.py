"""A connection to the process of an embedded engine; and an event loop in a thread, for callers that have none.

Imports no qdrant-client, which takes half a second: a command starts the process first, and itself meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hybridtei.errors import StoreAtCapacity, StoreError, StoreUnavailable
from hybridtei.retrieval.store.embedded_socket import LAYOUT, is_own, listening_at, release
from hybridtei.system import machine
from hybridtei.system.frames import HEADER, frame, unframe

START_S = 60.0
TAKEN_S, RETRY_S = 5.0, 0.1  # how long a folder's owner may be about to begin or to end, and between attempts
CLOSE_S = 120.0
MAX_WAITING = 1000  # calls, however fast they are: each holds its arguments
NEWEST_SHARE = 0.1  # weight of the newest call in a mean duration
MAX_INLINE_BYTES = 10**6  # larger answers are decoded in a thread
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH")
WITHOUT_COLLECTIONS: Mapping[str, Any] = {"collections": [], "aliases": {}, "describe": None, "drop": None}


@dataclass(eq=False, slots=True)
class _Call:
    """A call as a frame, and the future of its answer."""

    name: str
    message: bytes
    answer: asyncio.Future[Any]


class ProcessClient:
    """A connection to the folder's process, from the first call that needs one. Used from one event loop.

    While the folder holds no collection, only `create` starts a process, and reading makes neither folder nor file.
    """

    command: ClassVar[tuple[str, ...]] = ("-m", "hybridtei.retrieval.store.embedded_process")

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._folder = Path(os.path.abspath(path))  # the process works elsewhere
        self._clock = clock
        self._starting: asyncio.Task[None] | None = None
        self._waiting: dict[_Call, None] = {}  # calls whose callers wait, in their order, the sent one included
        self._sent: _Call | None = None  # the call that the process executes, whether or not its caller still waits
        self._sent_s = 0.0
        self._mean_s: dict[str, float] = {}  # duration of calls of this name
        self.pid: int | None = None  # of the process, while there is a connection to it
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._closed = False

    async def ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The process's answer. Raises StoreError with the process's words, StoreUnavailable if it dies or takes too long, and
        StoreAtCapacity at once if so many calls wait that this one would not be answered within `timeout_s`."""
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed")
        if self._writer is None and not self._holds_collections():
            if call in WITHOUT_COLLECTIONS:
                return copy(WITHOUT_COLLECTIONS[call])
            if call != "create":
                raise StoreError(f"embedded Qdrant: there is no collection {arguments[0]!r} in {self._folder}")
        return await self._ask(call, *arguments, timeout_s=timeout_s)

    def _holds_collections(self) -> bool:
        try:
            return any((entry / LAYOUT).is_file() for entry in self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _unusable(self.path, error) from error

    async def _ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        self._admit(timeout_s)
        waiting = _Call(call, frame([call, arguments]), asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        try:
            await self._joined()  # which has a bound of its own
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
        """Wait for the answers of all calls, and until all that was written is flushed."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._writer is None:
            return
        if self._waiting:
            await asyncio.wait([call.answer for call in self._waiting], timeout=CLOSE_S)
        with contextlib.suppress(StoreError):
            await self._ask("flush", timeout_s=CLOSE_S)
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            await self._listening

    async def _joined(self) -> None:
        """Connects to the process unless that is done. Callers share one start, which a cancelled caller does not stop."""
        if self._writer is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._join())
                self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())  # so retrieved
            await asyncio.shield(self._starting)

    async def _join(self) -> None:
        """Connects to the folder's process; starts it where there is none. Raises StoreError with the reason."""
        begun_s = self._clock()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self.path, error) from error
        while True:
            with contextlib.suppress(OSError, EOFError):  # it has ended, or is about to
                return await self._connect()
            word, message = await asyncio.to_thread(self._start)
            waited_s = self._clock() - begun_s
            if word == "refused" or (word == "taken" and waited_s > TAKEN_S):
                raise StoreError(message)
            if word == "dead" or waited_s > START_S:
                raise StoreUnavailable(f"{self.path}: the process of the embedded Qdrant engine does not start: {message}")
            if word == "taken":
                await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        """Raises OSError or EOFError if no process listens, StoreError if it is another release's."""
        place = listening_at(self._folder)
        if place is None:
            raise FileNotFoundError(self._folder)
        reader, writer = await asyncio.open_unix_connection(place)
        try:
            if not is_own(writer.get_extra_info("socket")):
                raise StoreError(f"{self.path}: {place} is another user's")
            async with asyncio.timeout(START_S):
                theirs, self.pid = await _receive(reader)
            if theirs != release():
                raise StoreError(
                    f"{self.path}: the folder is in use by {theirs}, and this is {release()}: use one release of both, or wait "
                    "until the commands of the other have ended"
                )
        except BaseException:
            writer.close()
            raise
        self._writer = writer
        self._listening = asyncio.create_task(self._listen(reader, writer))

    def _start(self) -> tuple[str, str]:
        """Start a process, and return what it tells: `ready`, `taken`, `refused` or `dead`, and the reason. Blocks."""
        try:
            started = subprocess.Popen(
                machine.python_command(*self.command, str(self._folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd=machine.NEUTRAL,
                env={**_environment(), "RUST_BACKTRACE": "0"},
            )
            line, _ = started.communicate(timeout=START_S)
            word, message = json.loads(line)
        except (OSError, subprocess.TimeoutExpired) as error:
            return "dead", str(error)
        except ValueError:
            return "dead", "it ended before it told why"
        return word, message or ""

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Resolves calls until the connection ends; then fails the calls that still wait."""
        try:
            while True:
                self._answered(*await _receive(reader))
        except (EOFError, ConnectionError):
            pass
        finally:
            self._writer = self._sent = self.pid = None
            ended = f"{self.path}: the process of the embedded Qdrant engine has ended; it is started again when asked"
            for call in self._waiting:
                if not call.answer.done():
                    call.answer.set_exception(StoreUnavailable(ended))
            writer.close()


def _unusable(path: str, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be used as the folder of the embedded Qdrant engine: {error}")


def _environment() -> dict[str, str]:
    """The variables that the process needs. It outlives its starter and serves other commands: it gets no keys."""
    everything = machine.child_environment()
    return {name: value for name, value in everything.items() if name in KEPT_VARIABLES or name.startswith("PYTHON")}


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    body = await reader.readexactly(length)
    return unframe(body) if length <= MAX_INLINE_BYTES else await asyncio.to_thread(unframe, body)


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
