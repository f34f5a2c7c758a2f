"""JSON read a value at a time, with the place of every mistake, in the words of TEI's parser: for bodies that were refused.

It is slow and reports every mistake; `decoding` reads with msgspec, which is fast and reports little. A place is a number of
bytes: for some mistakes TEI's parser names the byte that it has looked at (`ahead`), for others the last that it has taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

SPACE = re.compile(rb"[ \t\n\r]*")
PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS: dict[bytes, tuple[bytes, Any]] = {b"n": (b"null", None), b"t": (b"true", True), b"f": (b"false", False)}
HEX = re.compile(rb"[0-9a-fA-F]{4}")
ESCAPES = {b'"': '"', b"\\": "\\", b"/": "/", b"b": "\b", b"f": "\f", b"n": "\n", b"r": "\r", b"t": "\t"}
MAX_INTEGER, MIN_INTEGER = 2**64 - 1, -(2**63)


class Mistake(Exception):
    """What is wrong, and where. `is_syntax`: it is no JSON; else of another shape than expected."""

    def __init__(self, message: str, at: int | None, *, is_syntax: bool) -> None:
        super().__init__(message)
        self.message, self.at, self.is_syntax = message, at, is_syntax
        self.path: list[str | int] = []

    def below(self, step: str | int) -> Mistake:
        """Return the same mistake, with one step more before its path."""
        self.path.insert(0, step)
        return self


class JsonReader:
    """Reads JSON from `data`; `at` is the place of the next byte."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def peek(self) -> bytes:
        """Skip spaces; return the next byte, b"" at the end."""
        self.at = SPACE.match(self.data, self.at).end()  # type: ignore[union-attr]
        return self.data[self.at : self.at + 1]

    def ahead(self, message: str) -> Mistake:
        return Mistake(message, min(self.at + 1, len(self.data)), is_syntax=True)

    def here(self, message: str) -> Mistake:
        return Mistake(message, self.at, is_syntax=True)

    def value(self) -> Any:
        """Any value: None, bool, int, float, str, list, or the pairs of an object as a tuple."""
        first = self.peek()
        if first == b'"':
            return self.string()
        if first == b"[":
            items: list[Any] = []
            self.array(lambda _: items.append(self.value()))
            return items
        if first == b"{":
            pairs: list[tuple[str, Any]] = []
            self.object(lambda key: pairs.append((key, self.value())))
            return tuple(pairs)
        return self.scalar()

    def scalar(self) -> Any:
        """Read a number, null, true or false."""
        first = self.peek()
        if not first:
            raise self.ahead("EOF while parsing a value")
        if first in WORDS:
            return self._word(*WORDS[first])
        if first == b"-" or first.isdigit():
            return self._number()
        raise self.ahead("expected value")

    def array(self, item: Callable[[int], object]) -> None:
        """Read an array; `item` is called with the place of each item, and reads it."""
        self.at += 1
        place = 0
        try:
            while self.more_items(place):
                try:
                    item(place)
                except Mistake as mistake:
                    raise mistake.below(place) from None
                place += 1
        except Mistake as mistake:
            self.leave(mistake, b"]")
        self.at += 1

    def object(self, entry: Callable[[str], object]) -> None:
        """Read an object; `entry` is called with each key, and reads its value."""
        self.at += 1
        first = True
        try:
            while self.more_keys(first=first):
                key = self.string()
                self.colon()
                try:
                    entry(key)
                except Mistake as mistake:
                    raise mistake.below(key) from None
                first = False
        except Mistake as mistake:
            self.leave(mistake, b"}")
        self.at += 1

    def leave(self, mistake: Mistake, end: bytes) -> None:
        """A mistake without a place gets that where its array or object was left. Raises it."""
        if mistake.at is None:
            ended = self.peek() == end
            self.at += ended
            mistake.at = self.at
        raise mistake

    def more_items(self, place: int) -> bool:
        """Whether an array has another item; reads the comma before it."""
        next_byte = self.peek()
        if next_byte == b"]":
            return False
        if not next_byte:
            raise self.ahead("EOF while parsing a list")
        if place:
            self._comma(next_byte, "]", "EOF while parsing a value")
            if self.peek() == b"]":
                raise self.ahead("trailing comma")
        return True

    def more_keys(self, *, first: bool) -> bool:
        """Whether an object has another key; reads the comma before it."""
        next_byte = self.peek()
        if next_byte == b"}":
            return False
        if not next_byte:
            raise self.ahead("EOF while parsing an object")
        if not first:
            self._comma(next_byte, "}", "EOF while parsing a value")
            next_byte = self.peek()
            if next_byte == b"}":
                raise self.ahead("trailing comma")
        if next_byte != b'"':
            raise self.ahead("key must be a string")
        return True

    def _comma(self, next_byte: bytes, end: str, message: str) -> None:
        if next_byte != b",":
            raise self.ahead(f"expected `,` or `{end}`")
        self.at += 1
        if not self.peek():
            raise self.ahead(message)

    def colon(self) -> None:
        """Read a colon."""
        next_byte = self.peek()
        if next_byte != b":":
            raise self.ahead("expected `:`" if next_byte else "EOF while parsing an object")
        self.at += 1

    def _word(self, word: bytes, value: Any) -> Any:
        for letter in word:
            if self.at == len(self.data):
                raise self.here("EOF while parsing a value")
            self.at += 1
            if self.data[self.at - 1] != letter:
                raise self.here("expected ident")
        return value

    def _number(self) -> int | float:
        match = NUMBER.match(self.data, self.at)
        if match is None:
            self.at += 1
            raise self.ahead("invalid number" if self.at < len(self.data) else "EOF while parsing a value")
        self.at = match.end()
        if self.data[self.at : self.at + 1].isdigit() or self.data[self.at : self.at + 1] in (b".", b"e", b"E"):
            raise self.ahead("invalid number")
        if match[1] is None and match[2] is None and len(match[0]) <= 20 and MIN_INTEGER <= int(match[0]) <= MAX_INTEGER:
            return int(match[0])
        number = float(match[0])
        if number in (float("inf"), float("-inf")):
            raise self.here("number out of range")
        return number

    def string(self) -> str:
        """Read a string, from its quotation mark."""
        self.at += 1
        parts: list[str] = []
        while True:
            end = PLAIN.match(self.data, self.at).end()  # type: ignore[union-attr]
            raw, self.at = self.data[self.at : end], end
            parts.append(self._text(raw))
            if self.at == len(self.data):
                raise self.here("EOF while parsing a string")
            stop = self.data[self.at : self.at + 1]
            self.at += 1
            if stop == b'"':
                return "".join(parts)
            if stop != b"\\":
                raise self.here("control character (\\u0000-\\u001F) found while parsing a string")
            parts.append(self._escape())

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.here("invalid unicode code point") from None

    def _escape(self) -> str:
        letter = self.data[self.at : self.at + 1]
        if not letter:
            raise self.here("EOF while parsing a string")
        self.at += 1
        if letter in ESCAPES:
            return ESCAPES[letter]
        if letter != b"u":
            raise self.here("invalid escape")
        first = self._hex()
        if not 0xD800 <= first < 0xE000:
            return chr(first)
        if first >= 0xDC00:
            raise self.here("lone leading surrogate in hex escape")
        if self.data[self.at : self.at + 2] != b"\\u":
            self.at += 1
            raise self.here("unexpected end of hex escape")
        self.at += 2
        second = self._hex()
        if not 0xDC00 <= second < 0xE000:
            raise self.here("lone leading surrogate in hex escape")
        return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))

    def _hex(self) -> int:
        digits = self.data[self.at : self.at + 4]
        self.at += len(digits)
        if len(digits) < 4:
            raise self.here("EOF while parsing a string")
        if not HEX.fullmatch(digits):  # `int` would take signs, spaces and underscores
            raise self.here("invalid escape")
        return int(digits, 16)
