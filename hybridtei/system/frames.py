"""Messages between a process and the owner of its embedded engine: MessagePack behind a length, arrays as the bytes they are.

Never pickle: what arrives can only be numbers, strings, lists, maps and arrays.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<I")
MAX_FRAME = 2**31
_FLOATS, _ROWS, _INDICES = 1, 2, 3
_WIDTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """The message's bytes, its length in front. Arrays in it are float32[n], float32[n, d] or uint32[n]."""
    body = _ENCODER.encode(message)
    if len(body) >= MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes, allowed are {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def encoded(part: Any) -> msgspec.Raw:
    """A part of a message, to be framed as it is."""
    return msgspec.Raw(_ENCODER.encode(part))


def unframe(body: bytes) -> Any:
    """What was framed; arrays are read-only."""
    return _DECODER.decode(body)


def receive(connection: socket.socket) -> bytes:
    """The body of the next frame; blocks until it is whole. Raises EOFError if the other end is closed."""
    (length,) = HEADER.unpack(receive_exactly(connection, HEADER.size))
    return receive_exactly(connection, length)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes; blocks until they are there. Raises EOFError if the other end is closed."""
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
