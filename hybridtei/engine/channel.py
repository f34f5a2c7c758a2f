"""A stream socket that carries frames, on an event loop; and the same without one, for a process that has none yet.

Nothing is held back when the other side reads slowly: what may be under way is bounded by who was let in.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from hybridtei.engine.frames import PREFIX, decode, encode

ROOM_BYTES = 64 * 1024  # frames of more are received into memory of their own
JOIN_BYTES = 16 * 1024  # below, one copy costs less than several buffers to write


class Channel(asyncio.BufferedProtocol):
    """One end. `received`: called with each value that comes; `lost`: once, when the other end is gone or this one closed."""

    def __init__(self, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._room = memoryview(bytearray(ROOM_BYTES))
        self._into = self._room  # or the memory of one large frame
        self._filled = 0

    async def open(self, end: socket.socket) -> None:
        """Use a connected socket, which is the channel's from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, value: Any) -> None:
        """Nothing happens if the other end is gone."""
        if self._transport is None or self._transport.is_closing():
            return
        pieces = encode(value)
        if sum(map(len, pieces)) <= JOIN_BYTES:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        """Once what was sent is written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._into is not self._room:
            if self._filled == len(self._into):
                frame, self._into, self._filled = self._into, self._room, 0
                self._received(decode(frame))
            return
        at = 0
        while (size := self._size(at)) is not None and size <= self._filled - at:
            frame = memoryview(bytes(self._room[at : at + size]))  # a copy: arrays outlive the room
            at += size
            self._received(decode(frame))
        rest = self._room[at : self._filled]
        if size is not None and size > ROOM_BYTES:
            self._into = memoryview(bytearray(size))
        self._into[: len(rest)] = bytes(rest)
        self._filled = len(rest)

    def _size(self, at: int) -> int | None:
        """Of the frame that begins there, if it can be told yet."""
        return int(PREFIX.unpack_from(self._room, at)[0]) if self._filled - at >= PREFIX.size else None


def send_now(end: socket.socket, value: Any) -> None:
    """Blocks until it is written."""
    end.sendall(b"".join(encode(value)))


def receive_now(end: socket.socket) -> Any:
    """Blocks until a value is there. Raises EOFError if the other end is gone."""
    prefix = _exactly(end, PREFIX.size)
    return decode(prefix + _exactly(end, PREFIX.unpack(prefix)[0] - PREFIX.size))


def _exactly(end: socket.socket, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        part = end.recv(size - len(read))
        if not part:
            raise EOFError
        read += part
    return bytes(read)
