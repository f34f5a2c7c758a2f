"""Arrays -> protobuf's bytes, straight from memory: a packed field of floats is what numpy holds, behind a length.

Bytes of fields may be joined: a message is nothing but one field after the other.
"""

from __future__ import annotations

import numpy as np

from hybridtei.outputs import Floats

LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*low, number])


def nested(field: int, body: bytes) -> bytes:
    """A field that holds a message, a text or packed numbers."""
    return varint(field << 3 | LENGTH_DELIMITED) + varint(len(body)) + body


def floats(field: int, row: Floats) -> bytes:
    """float32[d] -> `repeated float`, packed."""
    return nested(field, row.astype("<f4", copy=False).tobytes())


def float_rows(field: int, inner: int, rows: Floats) -> bytes:
    """float32[t, d] -> a repeated message, each with `repeated float` as its field `inner`. All begin with the same bytes."""
    count, width = rows.shape
    body = floats(inner, np.zeros(width, dtype=np.float32))
    head = np.frombuffer(nested(field, body), dtype=np.uint8)[: -4 * width or None]
    whole = np.empty((count, len(head) + 4 * width), dtype=np.uint8)
    whole[:, : len(head)] = head
    whole[:, len(head) :] = np.ascontiguousarray(rows, dtype="<f4").view(np.uint8)
    return whole.tobytes()
