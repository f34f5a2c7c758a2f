"""Lines of a file, none longer than allowed in memory; with their numbers and places in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KEPT_BYTES = 1000  # of a line that is too long
SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """`data`: without the line end. `offset`: of its first byte in the file. `length`: of the whole line, in bytes; where the
    line is too long, `data` is only its beginning."""

    number: int
    offset: int
    data: bytes
    length: int
    is_whole: bool = True


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """Every line, numbered from 1; a byte order mark at the start is left out."""
    number = offset = 0
    while head := file.readline(max_bytes + len(BYTE_ORDER_MARK) + 2):
        number += 1
        length, last = len(head), head
        while not last.endswith(b"\n") and (last := file.readline(SKIP_BYTES)):
            length += len(last)
        ends = (last or head).endswith(b"\n")
        data = head.removesuffix(b"\n").removesuffix(b"\r")
        mark = BYTE_ORDER_MARK if number == 1 and data.startswith(BYTE_ORDER_MARK) else b""
        data = data[len(mark) :]
        if len(head) == length and len(data) <= max_bytes:
            yield Line(number, offset + len(mark), data, len(data))
        else:
            yield Line(number, offset + len(mark), data[:KEPT_BYTES], length - ends - len(mark), is_whole=False)
        offset += length


def decoded(line: Line) -> str:
    """Its text. Raises ValueError, which names the byte of the file that is not UTF-8."""
    try:
        return line.data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {line.offset + error.start} of the file") from None
