"""The process that alone owns the folder of an embedded engine: `python -m hybridtei.retrieval.store.embedded_process FOLDER`.

The first command that needs the folder starts it, and every command of the same user joins it through a socket. It is in a
session of its own, so a Ctrl-C does not reach it, and it ends some seconds after the last client has gone. It executes one call
at a time, one of each client in turn, since the engine holds Python's lock for a whole call.

It tells its starter by a line on stdout, JSON of [word, message]: `ready`, `refused`, or `taken` by another process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtei.retrieval.store.embedded_folder import Folder
from hybridtei.retrieval.store.embedded_socket import FolderError, FolderTaken, is_own, release, socket_path
from hybridtei.system.frames import HEADER, MAX_FRAME, frame, unframe

LINGER_S = 5.0  # from the last client to the end
FIRST_CLIENT_S = 60.0  # from the start, for the client that started it
STALLED_S = 60.0  # a client that sends half a frame, or does not read its answer, is disconnected
DEADLINE_S = 120.0  # the longest call; `optimize` has none
TICK_S, IDLE_TICKS = 1.0, 5  # ticks without a call, before an optimization, during which every call waits
MAX_CLIENTS = 256
PIECE = 2**20  # bytes read at once


@dataclass(eq=False, slots=True)
class _Client:
    """`received`: bytes of requests not answered yet. `unsent`: of an answer. `moved_s`: when bytes last came or went."""

    connection: socket.socket
    moved_s: float
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    def request(self) -> bytes | None:
        """The body of the first request, if it is whole. Raises ValueError on one that is too large."""
        if len(self.received) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self.received)
        if length >= MAX_FRAME:
            raise ValueError(length)
        end = HEADER.size + length
        return bytes(memoryview(self.received)[HEADER.size : end]) if len(self.received) >= end else None

    @property
    def is_stuck(self) -> bool:
        """Whether it is in the midst of a request or an answer."""
        return bool(self.unsent or self.received)


class Service:
    """The listening socket, its clients, and the folder whose calls they make."""

    def __init__(self, folder: Folder, listener: socket.socket, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._listener, self._clock = folder, listener, clock
        self._linger_s = LINGER_S
        self._clients: list[_Client] = []
        self._ends_s = clock() + FIRST_CLIENT_S  # unless a client comes
        self._idle_ticks = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._greeting = frame([release(), os.getpid()])

    def run(self) -> None:
        """Serve until no client has been there for a while."""
        answered = False
        while self._clients or self._clock() < self._ends_s:
            events = self._selector.select(0 if answered else TICK_S)
            for key, mask in events:
                self._happened(key.data, mask)
            answered = self._answer_each()
            if events or answered:
                self._idle_ticks = 0
            else:
                self._idle_ticks += 1
                self._folder.tidy(optimizing=self._idle_ticks >= IDLE_TICKS)
            for client in [one for one in self._clients if one.is_stuck and self._clock() - one.moved_s > STALLED_S]:
                self._disconnect(client)

    def hurry(self, *_: object) -> None:
        """End once no client is there."""
        self._linger_s, self._ends_s = 0.0, self._clock()

    def _happened(self, client: _Client | None, mask: int) -> None:
        try:
            if client is None:
                self._accept()
            elif mask & selectors.EVENT_WRITE:
                self._send(client)
            else:
                self._receive(client)
        except BlockingIOError:
            pass
        except OSError:
            if client is not None:
                self._disconnect(client)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._clients) >= MAX_CLIENTS or not is_own(connection):
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection, self._clock())
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._reply(client, self._greeting)

    def _receive(self, client: _Client) -> None:
        piece = client.connection.recv(PIECE)
        if not piece:
            return self._disconnect(client)
        client.received += piece
        client.moved_s = self._clock()

    def _answer_each(self) -> bool:
        """Execute the first whole request of each client; whether there was one."""
        answered = False
        for client in list(self._clients):
            try:
                body = None if client.unsent else client.request()
                if body is not None:
                    del client.received[: HEADER.size + len(body)]
                    self._reply(client, self._answer(*unframe(body)))
                    answered = True
            except (ValueError, TypeError):  # what it sent is no request
                self._disconnect(client)
        return answered

    def _answer(self, call: str, arguments: list[Any]) -> bytes:
        method: Callable[..., Any] | None = getattr(self._folder, call, None) if call in Folder.CALLS else None
        if method is None:
            return frame(["error", f"no such call: {call}"])
        try:
            if call != "optimize":  # the engine holds Python's lock: only the system's own alarm ends this process
                signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
            return frame(["done", method(*arguments)])
        except Exception as error:
            return frame(["error", str(error) if isinstance(error, FolderError) else f"{error} ({type(error).__name__})"])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _reply(self, client: _Client, message: bytes) -> None:
        client.unsent, client.moved_s = memoryview(message), self._clock()
        try:
            self._send(client)
        except BlockingIOError:
            self._selector.modify(client.connection, selectors.EVENT_WRITE, client)
        except OSError:
            self._disconnect(client)

    def _send(self, client: _Client) -> None:
        """Send what the connection takes; the client's next request is read once all is sent. Raises BlockingIOError."""
        while client.unsent:
            client.unsent = client.unsent[client.connection.send(client.unsent) :]
            client.moved_s = self._clock()
        self._selector.modify(client.connection, selectors.EVENT_READ, client)

    def _disconnect(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()
            self._ends_s = self._clock() + self._linger_s


def main(path: str) -> int:
    """Serve the folder; the exit status."""
    if os.fork():  # the starter waits for this process alone; init reaps the child
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = None
    try:
        folder = Folder(Path(path))
        place = socket_path(folder.path)
        listener = _listen(place)
        folder.tell(str(place))
    except (FolderError, OSError) as error:
        _report("taken" if isinstance(error, FolderTaken) else "refused", f"{error}")
        return 1
    service = Service(folder, listener)
    signal.signal(signal.SIGTERM, service.hurry)
    _report("ready", None)
    try:
        service.run()
    finally:
        place.unlink(missing_ok=True)  # before the folder is unlocked: the next owner has a socket of this name
        listener.close()
        folder.close()
    return 0


def _listen(place: Path) -> socket.socket:
    """A listening socket for this user alone, in the place of one that a killed process left."""
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    listener.bind(str(place))
    os.umask(umask)
    listener.listen(MAX_CLIENTS)
    listener.setblocking(False)
    return listener


def _report(word: str, message: str | None) -> None:
    print(json.dumps([word, message]), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
