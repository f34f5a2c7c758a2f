"""Values of ours <-> bytes, between the processes of one server: a small msgpack head, then arrays as they lie in memory.

What travels: numbers, texts, lists, tuples, mappings, sets, paths, enums, arrays, and this package's own dataclasses and
settings, by name. Not pickle: what is read can make values of these kinds, and nothing else. Arrays come out as views of the
frame, so nothing is done per token or number.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridtei.system.frames import receive_exactly

PREFIX = struct.Struct("<QQ")  # bytes of the whole frame, bytes of its head
ALIGNMENT = 8  # of the arrays within a frame
PACKAGE = "hybridtei."
PLAIN = frozenset({type(None), str, int, float, bool})
SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "frozenset": frozenset}
Buffer = bytes | memoryview


def encode(value: Any) -> list[Buffer]:
    """A frame, in pieces; large arrays are not copied."""
    arrays = _Arrays()
    head = msgspec.msgpack.encode(_plain(value, arrays))
    size = PREFIX.size + _aligned(len(head)) + arrays.size
    return [PREFIX.pack(size, len(head)), *_padded(head), *arrays.pieces]


def decode(frame: Buffer) -> Any:
    """The value of a whole frame, whose arrays live as long as the frame."""
    _, head = PREFIX.unpack_from(frame)
    tree = msgspec.msgpack.decode(memoryview(frame)[PREFIX.size : PREFIX.size + head])
    return _value(tree, frame, PREFIX.size + _aligned(head))


class _Arrays:
    """Bytes of arrays, one behind the other."""

    def __init__(self) -> None:
        self.pieces: list[Buffer] = []
        self.size = 0

    def add(self, array: NDArray[Any]) -> int:
        """Where it will lie behind the head."""
        at = self.size
        for piece in _padded(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):
            self.pieces.append(piece)
            self.size += len(piece)
        return at


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _padded(piece: Buffer) -> list[Buffer]:
    missing = -len(piece) % ALIGNMENT
    return [piece, bytes(missing)] if missing else [piece]


def _plain(value: Any, arrays: _Arrays) -> Any:
    """What msgpack knows: a list begins with what it stands for, and everything else is itself."""
    kind: Any = type(value)
    tag, names = _sort(kind)
    if tag == "plain":
        return value
    if tag == "array":
        return [tag, value.dtype.str, value.shape, arrays.add(value)]
    if tag in ("path", "enum"):
        return [tag, str(value)] if tag == "path" else [tag, _name(kind), value.value]
    if tag == "record":
        return [tag, _name(kind), *[_plain(getattr(value, name), arrays) for name in names]]
    parts = [part for item in value.items() for part in item] if tag == "map" else value
    return [tag, *[_plain(part, arrays) for part in parts]]


def _value(tree: Any, frame: Buffer, arrays_at: int) -> Any:
    if type(tree) is not list:
        return tree
    tag = tree[0]
    if tag == "array":
        _, dtype, shape, at = tree
        array = np.frombuffer(frame, dtype, prod(shape), arrays_at + at)
        return array if len(shape) == 1 else array.reshape(shape)
    if tag in ("enum", "path"):
        return Path(tree[1]) if tag == "path" else _kind(tree[1])(tree[2])
    if tag == "record":
        return _kind(tree[1])(*[_value(part, frame, arrays_at) for part in tree[2:]])
    values = [_value(part, frame, arrays_at) for part in tree[1:]]
    if tag == "map":
        return dict(zip(values[::2], values[1::2], strict=True))
    return SEQUENCES[tag](values)


@cache
def _sort(kind: Any) -> tuple[str, Sequence[str]]:
    """What a value of this type is sent as; of a record, the names of its fields."""
    if kind in PLAIN:
        return "plain", ()
    if is_dataclass(kind):
        return "record", [field.name for field in fields(kind)]
    if issubclass(kind, msgspec.Struct):
        return "record", kind.__struct_fields__
    for base, tag in ((np.ndarray, "array"), (Path, "path"), (Enum, "enum"), (Mapping, "map")):
        if issubclass(kind, base):
            return tag, ()
    if kind.__name__ in SEQUENCES:
        return kind.__name__, ()
    raise TypeError(f"{kind} does not travel")


@cache
def _name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _kind(name: str) -> Any:
    """What makes a record of its fields, or an enum's member of its value."""
    module, _, qualname = name.partition(":")
    kind = getattr(import_module(module), qualname) if module.startswith(PACKAGE) else None
    if not isinstance(kind, type) or _sort(kind)[0] not in ("record", "enum"):
        raise TypeError(f"{name} does not travel")
    return kind if issubclass(kind, Enum) else _maker(kind)


def _maker(kind: type) -> Callable[..., Any]:
    names = _sort(kind)[1]
    return lambda *values: kind(**dict(zip(names, values, strict=True)))


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
    prefix = receive_exactly(end, PREFIX.size)
    return decode(prefix + receive_exactly(end, PREFIX.unpack(prefix)[0] - PREFIX.size))
