"""Bytes for other processes: frames of MessagePack, and protobuf without generated classes.

A frame is a length, then MessagePack with arrays as raw bytes, never pickle. `frame` and `unframe`
carry numbers, strings, lists, maps and arrays. msgspec converts whole messages, the fastest way for
the points of an embedded store.

`varint` and `nested` encode protobuf, for messages that are too large or too simple for generated
classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<I")
MAX_FRAME = 2**31
_FLOATS, _ROWS, _INDICES = 1, 2, 3
_WIDTH = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """Return the length and the bytes of a message. Its arrays are float32[n], float32[n, d] or
    uint32[n]."""
    body = _ENCODER.encode(message)
    if len(body) >= MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes, allowed are {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def encoded(part: Any) -> msgspec.Raw:
    """Encode a part of a message, which `frame` then copies."""
    return msgspec.Raw(_ENCODER.encode(part))


def unframe(body: bytes) -> Any:
    """Decode a frame's body. The arrays are read-only."""
    return _DECODER.decode(body)


def _out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # Indices of sparse vectors
        if value.dtype in (np.uint32, np.int64) and value.ndim == 1:
            return msgspec.msgpack.Ext(_INDICES, value.astype("<u4", copy=False).tobytes())
        if value.dtype == np.float32 and value.ndim == 1:
            return msgspec.msgpack.Ext(_FLOATS, value.astype("<f4", copy=False).tobytes())
        if value.dtype == np.float32 and value.ndim == 2:
            return msgspec.msgpack.Ext(
                _ROWS, _WIDTH.pack(value.shape[1]) + value.astype("<f4", copy=False).tobytes()
            )
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


# protobuf's wire type
LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    """Encode a whole number >= 0 as protobuf does: seven bits a byte, the lowest first; the eighth
    bit means that more follow."""
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    low.append(number)
    return bytes(low)


def read_varint(content: bytes | mmap, at: int) -> tuple[int, int]:
    """Decode the varint at `at`. Return it and the place after it. Raises ValueError beyond 64
    bits, IndexError at the end."""
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
    """Yield (number, value) of each field of the protobuf message from `at` to `stop`. A value is a
    whole number or its bytes' place. Raises ValueError or IndexError."""
    while at < stop:
        tag, at = read_varint(content, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = read_varint(content, at)
            yield number, value
            continue
        if kind not in (1, LENGTH_DELIMITED, 5):
            raise ValueError(f"a field of unknown kind {kind} before byte {at}")
        if kind == LENGTH_DELIMITED:
            size, at = read_varint(content, at)
        else:
            # Numbers of 64 and of 32 bits
            size = {1: 8, 5: 4}[kind]
        if at + size > stop:
            raise ValueError(f"a field at byte {at} is longer than what holds it")
        yield number, slice(at, at + size)
        at += size


def nested(field: int, body: bytes) -> bytes:
    """Encode a protobuf field with a message, a text, bytes or packed numbers."""
    return varint(field << 3 | LENGTH_DELIMITED) + varint(len(body)) + body
