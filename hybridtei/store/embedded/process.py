"""The process that alone owns the embedded engine's folder: `python -m hybridtei.store.embedded.process FOLDER SOCKET`.

One request at a time, since the engine holds Python's lock for a whole call anyway, which is why it lives here and not in the
server. It ends, with everything flushed, when its parent closes the socket or dies; signals meant for the parent are ignored. A
collection is a folder: `layout.json` and `shard/`. The surprise: nothing optimises itself, so it is done here when nobody asks.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridtei.store.embedded.folder import Folder, FolderError
from hybridtei.store.embedded.frames import HEADER, frame, unframe

TICK_S = 1.0
QUIET_TICKS = 5  # without a call, before an optimisation, during which every call waits


class Refused(Exception):
    """The socket's other end is gone."""


def main(path: str, descriptor: int) -> int:
    """Serve until the socket closes; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    try:
        folder = Folder(Path(path))
    except FolderError as error:
        connection.sendall(frame(["refused", str(error)]))
        return 1
    connection.sendall(frame(["ready", None]))
    try:
        _serve(connection, folder)
    except (Refused, ConnectionError):
        pass
    finally:
        folder.close()
    return 0


def _serve(connection: socket.socket, folder: Folder) -> None:
    quiet = 0
    while True:
        if not select.select([connection], [], [], TICK_S if folder.untidy else None)[0]:
            quiet += 1
            folder.tidy(optimizing=quiet >= QUIET_TICKS)
            continue
        quiet = 0
        call, arguments = unframe(_read(connection))
        connection.sendall(frame(_answer(folder, call, arguments)))


def _answer(folder: Folder, call: str, arguments: list[Any]) -> tuple[str, Any]:
    method: Callable[..., Any] | None = getattr(folder, call, None) if call in Folder.CALLS else None
    if method is None:
        return "error", f"no such call: {call}"
    try:
        return "done", method(*arguments)
    except Exception as error:
        return "error", str(error) if isinstance(error, FolderError) else f"{error} ({type(error).__name__})"


def _read(connection: socket.socket) -> bytes:
    (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        received = connection.recv_into(view[done:])
        if received == 0:
            raise Refused
        done += received
    return bytes(buffer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
