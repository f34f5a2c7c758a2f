"""The process that owns the folder of an embedded engine: `python -m
hybridtei.retrieval.store.embedded_process FOLDER`.

The first command that needs the folder starts it, and every command of the same user joins it
through a socket. It has its own session, so Ctrl-C does not reach it, and it ends some seconds
after its last client. It executes one call at a time, one of each client in turn, since the engine
holds the GIL for a whole call.

It writes one line for its starter on stdout, the JSON [word, message]: `ready`, `refused`, or
`taken` by another process.

The socket lies in a private folder and is named by the store folder's device and inode, so every
path of the folder leads to it. The process that holds a `flock` on a file in the folder is the
owner, and the file's content is its socket. The system unlocks the file when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtei.errors import FolderReplaced, StoreError, UnsafeFile
from hybridtei.retrieval.store.base import identity
from hybridtei.system import machine
from hybridtei.system.frames import HEADER, MAX_FRAME, frame, unframe

if TYPE_CHECKING:
    from hybridtei.retrieval.store.embedded_folder import Folder

LOCK = ".lock"
MAX_LOCK_CHARACTERS = 4096
# Bytes; Linux takes 107, macOS 103
MAX_SOCKET_PATH = 100
# Between the last client and the end
LINGER_S = 5.0
# After the start, for the client that started it
FIRST_CLIENT_S = 60.0
# Bound of a call; `optimize`, and the opening of a collection, have none
DEADLINE_S = 120.0
# Ticks without a call before an optimization, which makes all calls wait
TICK_S, IDLE_TICKS = (1.0, 5)
# Then a client with half a frame or an unread answer is disconnected; a long call is one tick
STALLED_TICKS = 60
MAX_CLIENTS = 256
# Bytes of a request that are read ahead
BUFFER = 2**20
MOUNTS = Path("/proc/self/mountinfo")
NETWORK_TYPES = frozenset(
    {"afs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
)


class FolderTaken(StoreError):
    """Another process holds the folder's lock."""


def socket_path(folder: Path) -> Path:
    """Return the socket's path for a store folder's process. Raises StoreError if no private folder
    is usable."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    reason = ""
    homes = [
        Path(path, f"hybridtei-{os.geteuid()}")
        for path in dict.fromkeys((tempfile.gettempdir(), "/tmp"))
    ]
    if runtime:
        homes.insert(0, Path(runtime, "hybridtei"))
    for home in homes:
        if len(os.fsencode(home / _name(folder))) <= MAX_SOCKET_PATH:
            try:
                return machine.private_folder(home) / _name(folder)
            except OSError as error:
                reason = f": {error}"
    # Another user may have made all these folders first
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="hybridtei-", dir="/tmp"), _name(folder))
    raise StoreError(
        f"no folder for the socket of the embedded Qdrant engine{reason}: set XDG_RUNTIME_DIR to "
        "a private one"
    )


def listening_at(folder: Path) -> Path | None:
    """Return the socket named in the lock file, even of a dead process, or None.

    The path is not computed again, since a user's processes may have different temporary folders. A
    stranger's lock file could name any socket, so the name must be the folder's own, and `is_own`
    checks the listener. Raises UnsafeFile, OSError.
    """
    try:
        with open(machine.open_own(folder, LOCK, os.O_RDONLY), encoding="utf-8") as file:
            path = Path(file.read(MAX_LOCK_CHARACTERS))
    except (FileNotFoundError, ValueError):
        return None
    return path if path.name == _name(folder) else None


def _name(folder: Path) -> str:
    status = folder.stat()
    return hashlib.sha256(f"{status.st_dev}:{status.st_ino}".encode()).hexdigest()[:16] + ".sock"


def release() -> str:
    """The releases on which both ends of the socket must agree."""
    from hybridtei import __version__

    return f"hybridtei {__version__} with qdrant-edge-py {version('qdrant-edge-py')}"


def is_own(connection: Any) -> bool:
    """True if the socket's other end belongs to this user, as far as the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return int(user) == os.geteuid()


class Service:
    """The connected clients, and the folder that they call."""

    def __init__(self, folder: Folder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._lock = folder.path / LOCK
        self._identity = identity(self._lock)
        self._replaced = asyncio.Event()
        # The file of the socket that this process has bound
        self.bound: os.stat_result | None = None
        self._linger_s = LINGER_S
        self._clients: set[asyncio.StreamWriter] = set()
        # The remaining ticks for sending a request or reading an answer
        self._moving: dict[asyncio.StreamWriter, int] = {}
        # Unless a new client comes
        self._ends_s = clock() + FIRST_CLIENT_S
        self._idle_ticks = 0
        self._greeting = frame([release(), os.getpid()])

    async def run(self, listener: socket.socket) -> None:
        """Serve until there has been no client for a while; listen again if the socket's file was
        deleted, as cleaners of temporary folders do. Raises FolderReplaced."""
        place = Path(listener.getsockname())
        self.bound = place.lstat()
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=BUFFER)
        while self._clients or self._clock() < self._ends_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._replaced.wait()
            for client in self._moving:
                self._moving[client] -= 1
                if self._moving[client] < 0:
                    client.transport.abort()
            if not place.exists():
                server.close()
                place.parent.mkdir(mode=0o700, exist_ok=True)
                listener = _listen(place)
                self.bound = place.lstat()
                server = await asyncio.start_unix_server(self._serve, sock=listener, limit=BUFFER)
            await self._tidy()
            self._idle_ticks += 1
        server.close()

    async def _tidy(self) -> None:
        """Do all housekeeping that is due, with a turn for the clients after each piece. Raises
        FolderReplaced."""
        self._check_current()
        while self._folder.tidy(
            optimizing=self._idle_ticks >= IDLE_TICKS, is_idle=self._idle_ticks > 0
        ):
            await asyncio.sleep(0)
            self._check_current()

    def _check_current(self) -> None:
        """Raises FolderReplaced if the folder is another than the one that this process locked."""
        if self._replaced.is_set() or identity(self._lock) != self._identity:
            raise FolderReplaced(f"{self._folder.path} was deleted or replaced while it was in use")

    def hurry(self, *_: object) -> None:
        """End as soon as there is no client."""
        self._linger_s, self._ends_s = 0.0, self._clock()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client's requests until it leaves, stalls, or sends an invalid request."""
        takes_no_client = len(self._clients) >= MAX_CLIENTS or self._replaced.is_set()
        if takes_no_client or not is_own(writer.get_extra_info("socket")):
            return writer.close()
        self._clients.add(writer)
        # With a limit of 0, `drain` waits until everything is sent
        writer.transport.set_write_buffer_limits(0)
        try:
            await self._send(writer, self._greeting)
            while True:
                body = await self._request(reader, writer)
                self._idle_ticks = 0
                await self._send(writer, self._answer(*unframe(body)))
                # Give the other clients a turn
                await asyncio.sleep(0)
        except (EOFError, OSError, ValueError, TypeError):
            pass
        finally:
            self._clients.discard(writer)
            writer.close()
            self._ends_s = self._clock() + self._linger_s

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if length >= MAX_FRAME:
            raise ValueError(length)
        self._moving[writer] = STALLED_TICKS
        try:
            return await reader.readexactly(length)
        finally:
            del self._moving[writer]

    async def _send(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        self._moving[writer] = STALLED_TICKS
        try:
            writer.write(message)
            await writer.drain()
        finally:
            del self._moving[writer]

    def _answer(self, call: str, arguments: list[Any]) -> bytes:
        method: Callable[..., Any] | None = (
            getattr(self._folder, call, None) if call in self._folder.CALLS else None
        )
        if method is None:
            return frame(["error", f"no such call: {call}"])
        try:
            self._check_current()
            if call in self._folder.OPENING:
                self._folder.open(arguments[0])
            if call != "optimize":
                # The engine holds the GIL, so only the system's alarm can end this process.
                signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
            return frame(["done", method(*arguments)])
        except FolderReplaced as error:
            self._replaced.set()
            return frame(["replaced", str(error)])
        except UnsafeFile as error:
            return frame(["unsafe", str(error)])
        except StoreError as error:
            return frame(["error", str(error)])
        except Exception as error:
            return frame(["error", f"{error} ({type(error).__name__})"])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def main(path: str) -> int:
    """Serve the folder. Return the exit status."""
    # This imports the engine, which commands never import
    from hybridtei.retrieval.store.embedded_folder import Folder

    # The starter waits only for this process, which ends; init reaps the child, which serves
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lock = take(Path(path))
        place = socket_path(Path(path))
        listener = _listen(place)
        lock.truncate(0)
        lock.write(str(place))
        lock.flush()
        folder = Folder(Path(path))
    except (StoreError, OSError) as error:
        _report("taken" if isinstance(error, FolderTaken) else "refused", f"{error}")
        return 1
    service = Service(folder)
    signal.signal(signal.SIGTERM, service.hurry)
    _report("ready", None)
    try:
        try:
            asyncio.run(service.run(listener))
        finally:
            # Before unlocking the folder, since the next owner's socket has the same name.
            _remove(place, service.bound)
        folder.close()
    except FolderReplaced:
        # Without a flush, whose paths may lead to files that are not this process's.
        os._exit(1)
    lock.close()
    return 0


def _remove(place: Path, bound: os.stat_result | None) -> None:
    """Remove the socket, unless another process has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        if bound is not None and os.path.samestat(place.lstat(), bound):
            place.unlink()


def take(folder: Path) -> Any:
    """Lock the folder and return the open lock file. Raises FolderTaken, UnsafeFile, or StoreError
    with the reason."""
    kind = _network_type(folder)
    if kind is not None:
        raise StoreError(
            f"{folder}: on a network file system ({kind}), whose locks and mapped files are "
            "unreliable for the embedded Qdrant engine: choose a folder on a local disk, or run "
            "a Qdrant server"
        )
    try:
        descriptor = machine.open_own(folder, LOCK, os.O_RDWR | os.O_CREAT)
        file = os.fdopen(descriptor, "r+")
    except UnsafeFile:
        raise
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be used as the folder of the embedded Qdrant engine: {error}"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise FolderTaken(
            f"{folder}: another process has this folder of the embedded Qdrant engine open and "
            "does not answer: it belongs to another user, container or machine, or to hybridtei "
            "0.1; stop it, choose another folder, or run a Qdrant server"
        ) from error
    return file


def _network_type(folder: Path) -> str | None:
    """The type of the folder's network file system; None on other file systems, or if the system
    does not tell."""
    device = folder.stat().st_dev
    key = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [
            line.split()
            for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
    except OSError:
        return None
    # In /proc/self/mountinfo the third field is the device, and "-" stands before the type
    kinds = {
        fields[fields.index("-") + 1] for fields in mounts if "-" in fields and fields[2] == key
    }
    return min(kinds & NETWORK_TYPES, default=None)


def _listen(place: Path) -> socket.socket:
    """A listening socket for only this user. It replaces the socket of a killed process."""
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    listener.bind(str(place))
    os.umask(umask)
    listener.listen(MAX_CLIENTS)
    return listener


def _report(word: str, message: str | None) -> None:
    """Write the line that the starter reads, and close the pipe to it."""
    print(json.dumps([word, message]), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
