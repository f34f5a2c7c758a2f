"""A valid JSON value -> bytes with no, one or several faults in shape or spelling."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

DEEP = 10_000
# Bytes; what is far above the payload limit is refused unread, and its sender may not hear why
LARGEST = 2_500_000
ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "\ufeff",
    "\ufeffbaka",
    "\u202e",
    "\U0010ffff",
    "a\x00b",
    "\r\n",
    "\u0300" * 300,
    "<s>",
    "[SEP]",
    "[MASK]",
    "../../etc/passwd",
    "%s%n",
    "{{7*7}}",
    "true",
    "NaN",
    "-1",
    "\u2028",
    "ß" * 500,
    "🏳️‍🌈" * 50,
    "ば" * 700,
    "##ka",
    "▁",
)
ODD_NUMBERS = (
    -1,
    0,
    1,
    2,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e300,
    5e-324,
    999_999,
)
RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"-1e999",
    b"01",
    b"+1",
    b"1.",
    b".5",
    b"0x10",
    b"1e",
    b"--1",
    b"'text'",
    b"undefined",
    b"nul",
    b"tru",
    b"//",
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\ud800x"',
    b'"\\u12"',
    b'"\\x41"',
    b'"\xff\xfe"',
    b'"\xc0\xaf"',
    b'"\xed\xa0\x80"',
    b'"\x01"',
    b'"\t"',
    b'"\\u0000"',
    b"[" * DEEP + b"]" * DEEP,
    b"[" * DEEP,
    b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b"1" * 5000,
    b"1." + b"0" * 5000,
    b"-" + b"9" * 400,
    b'"' + b"\\n" * 3000 + b'"',
)
HOLE = "\x1ahole\x1a"

Change = Callable[[Random, Any], Any]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a value, the whole first."""
    found = [path]
    steps = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for step, inner in steps:
        found += places(inner, (*path, step))
    return found


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], change)
    return copy


def other_type(draw: Random, value: Any) -> Any:
    """Return a value of another type, or an unusual value of the same type."""
    options: tuple[Any, ...] = (
        None,
        True,
        draw.choice(ODD_NUMBERS),
        draw.choice(ODD_TEXTS),
        [],
        {},
        [value],
        {"a": value},
        [[value]],
        [None],
        [value, draw.choice(ODD_NUMBERS)],
        {"text": value},
        [draw.choice(ODD_TEXTS)],
        draw.choice(ODD_NUMBERS) if isinstance(value, int) else draw.choice(ODD_TEXTS),
        [value] * _times(value, draw.choice((2, 32, 33, 600))),
    )
    return draw.choice(options)


def lost_or_found(draw: Random, value: Any) -> Any:
    """A key or an item less, or more."""
    if isinstance(value, dict) and value:
        if draw.random() < 0.5:
            gone = draw.choice(list(value))
            return {name: inner for name, inner in value.items() if name != gone}
        return {
            **value,
            draw.choice(
                ("model", "unknown", "\x00", "", "inputs", "texts", "input", "dimensions")
            ): other_type(draw, 1),
        }
    if isinstance(value, list):
        return value[:-1] if draw.random() < 0.5 else [*value, *value]
    return other_type(draw, value)


def longer(draw: Random, value: Any) -> Any:
    """A text or a list much longer than a model reads."""
    if isinstance(value, str):
        return (
            value * _times(value, draw.choice((2, 50, 400)))
            if draw.random() < 0.8
            else "\u0301" * draw.choice((100, 5000))
        )
    if isinstance(value, list):
        return value * _times(value, draw.choice((2, 10, 40)))
    return other_type(draw, value)


def _times(value: Any, wanted: int) -> int:
    """The number of repetitions of a value that still fit the largest body sent."""
    return max(min(wanted, LARGEST // (size(value) + 1)), 1)


def size(value: Any) -> int:
    """Return the approximate size of a value as JSON, in bytes."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, dict):
        return sum(len(name) + 4 + size(inner) for name, inner in value.items())
    return sum(map(size, value)) + 2 if isinstance(value, list) else 6


def mutated(draw: Random, value: Any) -> bytes:
    """JSON of a value with one to three changes, and sometimes one of its bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice((other_type, other_type, lost_or_found, longer))
        value = changed(
            value, draw.choice(places(value)), lambda inner, change=change: change(draw, inner)
        )
    if draw.random() < 0.25:
        value = changed(value, draw.choice(places(value)), lambda _: HOLE)
    data = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    data = data.replace(json.dumps(HOLE).encode(), draw.choice(RAW))[:LARGEST]
    return spoiled(draw, data) if draw.random() < 0.35 else data


def spoiled(draw: Random, data: bytes) -> bytes:
    """Return the bytes of JSON with a fault."""
    return draw.choice(SPOILERS)(draw, data)


def _cut(draw: Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flipped(draw: Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if found:
            found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


def _inserted(draw: Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    more = draw.choice(
        (
            b"\x00",
            b"\xef\xbb\xbf",
            b",",
            b"]",
            b"}",
            b'"',
            b"\\",
            b"\xff",
            b" " * 3000,
            b"/*x*/",
            draw.choice(RAW),
        )
    )
    return data[:at] + more + data[at:]


def _twice(draw: Random, data: bytes) -> bytes:
    """Return JSON with a repeated key."""
    if not data.startswith(b"{") or len(data) < 4:
        return data + data
    key = draw.choice(
        (b"inputs", b"input", b"query", b"truncate", b"model", b"\\u0069nputs", b"texts")
    )
    return (
        b'{"' + key + b'":' + draw.choice((b"null", b'"x"', b"[]", b'["a","b"]')) + b"," + data[1:]
    )


def _after(draw: Random, data: bytes) -> bytes:
    return data + draw.choice((b"x", b"{}", b"\x00", b"\n\n", b"]", data, b" " * 2000))


def _before(draw: Random, data: bytes) -> bytes:
    return (
        draw.choice(
            (
                b"\xef\xbb\xbf",
                b"\xff\xfe",
                b"\x00",
                b"\n\t ",
                b")]}',\n",
                b"\x1f\x8b",
                b"\x28\xb5\x2f\xfd",
            )
        )
        + data
    )


def _wide(draw: Random, data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode(
        draw.choice(("utf-16", "utf-32", "utf-16-le", "utf-7")), "replace"
    )


def _noise(draw: Random, data: bytes) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 2, 7, 100, 2000)))


SPOILERS = (_cut, _flipped, _inserted, _twice, _after, _before, _wide, _noise)
