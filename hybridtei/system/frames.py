"""Frames between processes: MessagePack behind a length, arrays as the bytes they are. Never pickle.

`frame` and `unframe` carry numbers, strings, lists, maps and arrays; msgspec converts them whole, which is quickest for the
points of an embedded store. `encode` and `decode` also carry tuples, sets, paths, enums, and this package's own dataclasses and
settings, by name; arrays come out as views of the frame, so nothing is done per token or number. Nothing else can be decoded.

`varint` and `nested` are protobuf's, for messages that are too large or too simple for generated classes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<I")
MAX_FRAME = 2**31
_FLOATS, _ROWS, _INDICES = 1, 2, 3
_WIDTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """Return the message's bytes behind their length. Its arrays are float32[n], float32[n, d] or uint32[n]."""
    body = _ENCODER.encode(message)
    if len(body) >= MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes, allowed are {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def encoded(part: Any) -> msgspec.Raw:
    """Encode a part of a message, to be framed as it is."""
    return msgspec.Raw(_ENCODER.encode(part))


def unframe(body: bytes) -> Any:
    """Return the message of a frame's body; its arrays are read-only."""
    return _DECODER.decode(body)


def receive(connection: socket.socket) -> bytes:
    """Block until the next frame is whole and return its body. Raises EOFError if the other end is closed."""
    (length,) = HEADER.unpack(receive_exactly(connection, HEADER.size))
    return receive_exactly(connection, length)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Block until `size` bytes are there and return them. Raises EOFError if the other end is closed."""
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        received = connection.recv_into(view[done:])
        if received == 0:
            raise EOFError
        done += received
    return bytes(buffer)


def _out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint32 and value.ndim == 1:
            return msgspec.msgpack.Ext(_INDICES, value.astype("<u4", copy=False).tobytes())
        if value.dtype == np.float32 and value.ndim == 1:
            return msgspec.msgpack.Ext(_FLOATS, value.astype("<f4", copy=False).tobytes())
        if value.dtype == np.float32 and value.ndim == 2:
            return msgspec.msgpack.Ext(_ROWS, _WIDTH.pack(value.shape[1]) + value.astype("<f4", copy=False).tobytes())
    raise TypeError(f"cannot be sent: {type(value).__name__}")


def _in(code: int, data: memoryview) -> NDArray[Any]:
    if code == _FLOATS:
        return np.frombuffer(data, dtype="<f4")
    if code == _INDICES:
        return np.frombuffer(data, dtype="<u4")
    if code == _ROWS:
        (width,) = _WIDTH.unpack_from(data)
        return np.frombuffer(data, dtype="<f4", offset=_WIDTH.size).reshape(-1, width)
    raise ValueError(f"unknown kind of array: {code}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_out)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_in)


PREFIX = struct.Struct("<QQ")  # bytes of the whole frame, bytes of its head
ALIGNMENT = 8  # of the arrays within a frame
PACKAGE = "hybridtei."
LENGTH_DELIMITED = 2  # protobuf's wire type
PLAIN = frozenset({type(None), str, int, float, bool})
SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "frozenset": frozenset}
Buffer = bytes | memoryview


def encode(value: Any) -> list[Buffer]:
    """Return a frame in pieces; large arrays are not copied."""
    arrays = _Arrays()
    head = msgspec.msgpack.encode(_plain(value, arrays))
    size = PREFIX.size + _aligned(len(head)) + arrays.size
    return [PREFIX.pack(size, len(head)), *_padded(head), *arrays.pieces]


def decode(frame: Buffer) -> Any:
    """Return the value of a whole frame; its arrays are views of the frame."""
    _, head = PREFIX.unpack_from(frame)
    tree = msgspec.msgpack.decode(memoryview(frame)[PREFIX.size : PREFIX.size + head])
    return _value(tree, frame, PREFIX.size + _aligned(head))


class _Arrays:
    """The bytes of arrays, one behind the other."""

    def __init__(self) -> None:
        self.pieces: list[Buffer] = []
        self.size = 0

    def add(self, array: NDArray[Any]) -> int:
        """Add an array and return its place behind the head."""
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
    """Return the value in msgpack's types: lists begin with a tag, everything else stands for itself."""
    kind: Any = type(value)
    tag, names = _tag_of(kind)
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
def _tag_of(kind: Any) -> tuple[str, Sequence[str]]:
    """Return the tag of values of this type, and for records the names of their fields."""
    if kind in PLAIN:
        return "plain", ()
    if is_dataclass(kind):
        return "record", [field.name for field in fields(kind) if field.init]
    if issubclass(kind, msgspec.Struct):
        return "record", kind.__struct_fields__
    for base, tag in ((np.ndarray, "array"), (Path, "path"), (Enum, "enum"), (Mapping, "map")):
        if issubclass(kind, base):
            return tag, ()
    if kind.__name__ in SEQUENCES:
        return kind.__name__, ()
    raise TypeError(f"{kind} cannot be sent")


@cache
def _name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _kind(name: str) -> Any:
    """Return the function that makes a record of its fields, or an enum's member of its value."""
    module, _, qualname = name.partition(":")
    kind = getattr(import_module(module), qualname) if module.startswith(PACKAGE) else None
    if not isinstance(kind, type) or _tag_of(kind)[0] not in ("record", "enum"):
        raise TypeError(f"{name} cannot be sent")
    return kind if issubclass(kind, Enum) else _maker(kind)


def _maker(kind: type) -> Callable[..., Any]:
    names = _tag_of(kind)[1]
    return lambda *values: kind(**dict(zip(names, values, strict=True)))


def varint(number: int) -> bytes:
    """Encode a whole number of at least 0 as protobuf does: seven bits a byte, the lowest first; the eighth says that more
    follow."""
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    low.append(number)
    return bytes(low)


def read_varint(content: bytes | mmap, at: int) -> tuple[int, int]:
    """Decode the varint at `at`; return it and the place behind it. Raises ValueError beyond 64 bits, IndexError at the end."""
    value, shift = 0, 0
    while shift < 64:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number longer than 64 bits before byte {at}")


def message_fields(content: bytes | mmap, at: int, stop: int) -> Iterator[tuple[int, int | slice]]:
    """Yield the number and the value of each field of the protobuf message from `at` to `stop`: a whole number, or where its
    bytes lie. Raises ValueError or IndexError."""
    while at < stop:
        tag, at = read_varint(content, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = read_varint(content, at)
            yield number, value
            continue
        if kind not in (1, LENGTH_DELIMITED, 5):
            raise ValueError(f"a field of unknown kind {kind} before byte {at}")
        size, at = read_varint(content, at) if kind == LENGTH_DELIMITED else ({1: 8, 5: 4}[kind], at)
        if at + size > stop:
            raise ValueError(f"a field at byte {at} is longer than what holds it")
        yield number, slice(at, at + size)
        at += size


def nested(field: int, body: bytes) -> bytes:
    """Encode a protobuf field that holds a message, a text, bytes or packed numbers."""
    return varint(field << 3 | LENGTH_DELIMITED) + varint(len(body)) + body
