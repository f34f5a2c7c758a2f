"""Finds the process of an embedded engine, and connects to it.

A folder has one process, and any command of the same user may connect to its socket. The socket lies in a private folder and is
named by the store folder's device and inode, so every path of the folder leads to it. The process that holds a `flock` on a
file in the folder is the owner, and the file's content is its socket. The system unlocks the file when the process ends.

This module does not import qdrant-client, which takes half a second, so a command can start the process first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from copy import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from hybridtei.errors import StoreAtCapacity, StoreError, StoreUnavailable
from hybridtei.system import machine
from hybridtei.system.frames import HEADER, frame, unframe
from hybridtei.system.own_loop import started

LOCK = ".lock"
LAYOUT = "layout.json"  # a file in each collection's folder
MAX_SOCKET_PATH = 100  # bytes; Linux takes 107, macOS 103
START_S = 60.0
TAKEN_S, RETRY_S = 5.0, 0.1  # how long a folder's owner may take to start or end; between attempts
CLOSE_S = 120.0
MAX_WAITING = 1000  # waiting calls, even fast ones, since each holds its arguments
NEWEST_SHARE = 0.1  # weight of the newest call in a mean duration
MAX_INLINE_BYTES = 10**6  # larger answers are decoded in a thread
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH")
WITHOUT_COLLECTIONS: Mapping[str, Any] = {"collections": [], "aliases": {}, "describe": None, "drop": None}


class FolderError(Exception):
    """An error with a message for the caller."""


class FolderTaken(FolderError):
    """Another process holds the folder's lock."""


def socket_path(folder: Path) -> Path:
    """Return the socket's path for a store folder's process. Raises FolderError if no private folder is usable."""
    own, refused = os.environ.get("XDG_RUNTIME_DIR"), ""
    homes = [Path(path, f"hybridtei-{os.geteuid()}") for path in dict.fromkeys((tempfile.gettempdir(), "/tmp"))]
    for home in (*([Path(own, "hybridtei")] if own else []), *homes):
        if len(os.fsencode(home / _name(folder))) <= MAX_SOCKET_PATH:
            try:
                return machine.private_folder(home) / _name(folder)
            except OSError as error:
                refused = f": {error}"
    raise FolderError(f"no folder for the socket of the embedded Qdrant engine{refused}: set XDG_RUNTIME_DIR to a private one")


def listening_at(folder: Path) -> Path | None:
    """Return the socket named in the lock file, even of a dead process, or None.

    The path is not computed again, since a user's processes may have different temporary folders. A stranger's lock file could
    name any socket, so the name must be the folder's own, and `is_own` checks the listener.
    """
    try:
        path = Path((folder / LOCK).read_text(encoding="utf-8"))
        return path if path.name == _name(folder) else None
    except (OSError, ValueError):
        return None


def _name(folder: Path) -> str:
    found = folder.stat()
    return hashlib.sha256(f"{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:16] + ".sock"


def release() -> str:
    """The releases on which both ends of the socket must agree."""
    from hybridtei import __version__

    return f"hybridtei {__version__} with qdrant-edge-py {version('qdrant-edge-py')}"


def is_own(connection: Any) -> bool:
    """True if the socket's other end belongs to this user, as far as the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(user) == os.geteuid()


class ProcessClient:
    """A connection to the folder's process, opened at the first call that needs it. For one event loop.

    While the folder has no collection, only `create` starts a process, and reads create no file or folder.
    """

    command: ClassVar[tuple[str, ...]] = ("-m", "hybridtei.retrieval.store.embedded_process")

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._folder = Path(os.path.abspath(path))  # absolute, since the process has another working folder
        self._clock = clock
        self._starting: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held while the process executes a call, even if its caller is gone
        self._waiting: list[str] = []  # the names of waiting calls, the running one included
        self._mean_s: dict[str, float] = {}  # mean duration of calls by name
        self.pid: int | None = None  # of the latest process
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._closed = False

    @property
    def is_joined(self) -> bool:
        """True if there is a connection, and its other end is not known to be gone."""
        return self._streams is not None and not self._streams[0].at_eof()

    async def ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        """Call the process. Raises StoreError with the process's message, StoreUnavailable if it dies or takes too long, and
        StoreAtCapacity at once if the waiting calls leave no time for this one within `timeout_s`."""
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed")
        if not self.is_joined and not self._holds_collections():
            if call in WITHOUT_COLLECTIONS:
                return copy(WITHOUT_COLLECTIONS[call])
            if call != "create":
                raise StoreError(f"embedded Qdrant: there is no collection {arguments[0]!r} in {self._folder}")
        self._admit(timeout_s)
        return await self._ask(call, *arguments, timeout_s=timeout_s)

    def _holds_collections(self) -> bool:
        try:
            return any((entry / LAYOUT).is_file() for entry in self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _admit(self, timeout_s: float | None) -> None:
        """Raises StoreAtCapacity if the waiting calls will take longer than this one's timeout."""
        waiting = len(self._waiting)
        if timeout_s is None or waiting == 0:
            return
        expected_s = sum(self._mean_s.get(name, 0.0) for name in self._waiting)
        if waiting >= MAX_WAITING or expected_s > timeout_s:
            raise StoreAtCapacity(
                f"{self.path}: {waiting} calls wait for the embedded Qdrant engine, about {expected_s:.1f} s of work; one more "
                f"would not be answered within {timeout_s:g} s (qdrant-timeout): try again later"
            )

    async def _ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        message = frame([call, arguments])
        self._waiting.append(call)
        try:
            await self._joined()  # it has its own bound
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
                word, answer = await asyncio.shield(started(self._exchange(call, message)))
        except TimeoutError as error:
            raise _silent(self.path, timeout_s, ", or raise `qdrant_timeout`") from error
        except (EOFError, ConnectionError) as error:
            raise StoreUnavailable(
                f"{self.path}: the process of the embedded Qdrant engine has ended; it is started again when asked"
            ) from error
        finally:
            self._waiting.remove(call)
        if word != "done":
            raise StoreError(f"embedded Qdrant: {answer}")
        return answer

    async def _exchange(self, call: str, message: bytes) -> Any:
        """Send a call and read its whole answer, even if the caller is gone, since the next answer follows it."""
        try:
            if self._streams is None:
                raise EOFError
            reader, writer = self._streams
            began_s = self._clock()
            writer.write(message)
            answer = await _receive(reader)
            took_s = self._clock() - began_s
            mean_s = self._mean_s.get(call, took_s)
            self._mean_s[call] = mean_s + (took_s - mean_s) * NEWEST_SHARE
            return answer
        except (EOFError, ConnectionError):
            self._leave()
            raise
        finally:
            self._turn.release()

    async def close(self) -> None:
        """Wait for the answers of all calls, and for the flush of all writes."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self.is_joined:
            with contextlib.suppress(StoreError):
                await self._ask("flush", timeout_s=CLOSE_S)  # after the waiting calls
        if (writer := self._leave()) is not None:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _leave(self) -> asyncio.StreamWriter | None:
        """Close the connection, if there is one."""
        writer = None if self._streams is None else self._streams[1]
        self._streams = None
        if writer is not None:
            writer.close()
        return writer

    async def _joined(self) -> None:
        """Connect to the process, if not connected. Callers share one start, and cancelling a caller does not stop it."""
        if not self.is_joined:
            if self._starting is None or self._starting.done():
                self._starting = started(self._join())
            await asyncio.shield(self._starting)

    async def _join(self) -> None:
        """Connect to the folder's process, or start it. Raises StoreError with the reason."""
        begun_s = self._clock()
        self._leave()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self.path, error) from error
        while True:
            with contextlib.suppress(OSError, EOFError):  # it has ended or is ending
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
        """Connect. Raises OSError or EOFError if no process listens, StoreError for another release's process."""
        place = listening_at(self._folder)
        if place is None:
            raise FileNotFoundError(self._folder)
        reader, writer = await asyncio.open_unix_connection(place)
        try:
            if not is_own(writer.get_extra_info("socket")):
                raise StoreError(f"{self.path}: {place} is another user's")
            try:
                async with asyncio.timeout(START_S):
                    theirs, self.pid = await _receive(reader)
            except TimeoutError as error:
                raise _silent(self.path, START_S) from error
            if theirs != release():
                raise StoreError(
                    f"{self.path}: the folder is in use by {theirs}, and this is {release()}: use one release of both, or wait "
                    "until the commands of the other have ended"
                )
        except BaseException:
            writer.close()
            raise
        self._streams = reader, writer

    def _start(self) -> tuple[str, str]:
        """Start a process and wait for its word: `ready`, `taken`, `refused` or `dead`, and the reason."""
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


def _silent(path: str, seconds: float | None, hint: str = "") -> StoreUnavailable:
    """The error of a process that does not answer: during a call the engine also greets no client."""
    return StoreUnavailable(
        f"{path}: the embedded Qdrant engine has not answered for {seconds:g} s: it may be building an index; try later{hint}"
    )


def _unusable(path: str, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be used as the folder of the embedded Qdrant engine: {error}")


def _environment() -> dict[str, str]:
    """The process's environment variables, without keys, since it outlives its starter and serves other commands."""
    everything = machine.child_environment()
    return {name: value for name, value in everything.items() if name in KEPT_VARIABLES or name.startswith("PYTHON")}


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    body = await reader.readexactly(length)
    return unframe(body) if length <= MAX_INLINE_BYTES else await asyncio.to_thread(unframe, body)
