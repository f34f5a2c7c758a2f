"""A request of any size as a short line of JSON that can be sent again, and its bytes.

A body is JSON, in which an object with one of these keys is replaced by a large value: `*text`
[unit, times] a string, `*list` [item, times], `*keys` [value, times] an object, `*same` [key,
value, times] an object with one key many times, `*deep` times lists in each other. Units are
written as they are: `\\\\u0000` is six bytes of the body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

BODILESS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Request:
    """`query`: a unit of it, and how often; the value of a header may be given so, too. `copies`:
    so many on one connection without waiting, or so many messages of an RPC stream; `chunk`: bytes
    of a chunk, 0: the body comes whole; `connections`: of so many clients at once, all the same. An
    RPC's `path` is its method's."""

    method: str
    path: str
    body: Any = None
    query: Sequence[Any] = ()
    headers: Mapping[str, str | Sequence[Any]] = field(default_factory=dict)
    copies: int = 1
    chunk: int = 0
    connections: int = 1

    @classmethod
    def read(cls, line: str) -> Request:
        """Read a request from the line that `told` wrote."""
        return cls(**json.loads(line))

    def told(self) -> str:
        """All that differs from what is usual, as JSON."""
        plain = asdict(Request("", ""))
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value != plain[name]},
            ensure_ascii=False,
        )

    def content(self) -> bytes:
        """The sent body."""
        if self.method in BODILESS:
            return b""
        return encode(self.body)

    def pieces(self) -> tuple[bytes, ...]:
        """All bytes for a connection; the last request ends it."""
        content = self.content()
        headers = {
            "host": "amplify",
            **{name: _long(value) for name, value in self.headers.items()},
        }
        if self.method not in BODILESS:
            headers.setdefault("content-type", "application/json")
        if self.chunk:
            headers["transfer-encoding"] = "chunked"
            content = b"".join(_chunks(content, self.chunk))
        elif self.method not in BODILESS:
            headers["content-length"] = str(len(content))
        target = f"{self.path}?{_long(self.query)}" if self.query else self.path
        lines = [
            f"{self.method} {target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        one = "\r\n".join(lines).encode() + b"\r\n\r\n" + content
        return (one * self.copies,)


def route_of(request: Request) -> str:
    """A path without its model."""
    return "/" + request.path.split("/", 3)[3] if request.path.startswith("/m/") else request.path


def _long(value: str | Sequence[Any]) -> str:
    return value if isinstance(value, str) else value[0] * value[1]


def encode(body: Any) -> bytes:
    """JSON, with all that is large written out."""
    if isinstance(body, dict):
        if len(body) == 1 and (key := next(iter(body))) in MARKS:
            return MARKS[key](*(body[key] if isinstance(body[key], list) else [body[key]]))
        return (
            b"{"
            + b",".join(
                json.dumps(key).encode() + b":" + encode(value) for key, value in body.items()
            )
            + b"}"
        )
    if isinstance(body, list):
        return b"[" + b",".join(map(encode, body)) + b"]"
    return json.dumps(body, ensure_ascii=False).encode()


def _text(unit: str, times: int) -> bytes:
    return b'"' + unit.encode() * times + b'"'


MOST_BYTES = 100_000_000


def _list(item: Any, times: int) -> bytes:
    one = encode(item)
    # No server takes a larger body
    times = min(times, MOST_BYTES // (len(one) + 1) + 1)
    return b"[" + b",".join([one] * times) + b"]"


def _keys(value: Any, times: int) -> bytes:
    written = encode(value)
    return b"{" + b",".join(b'"%x":%b' % (number, written) for number in range(times)) + b"}"


def _same(key: str, value: Any, times: int) -> bytes:
    return b"{" + b",".join([b'"%b":%b' % (key.encode(), encode(value))] * times) + b"}"


def _deep(times: int) -> bytes:
    return b"[" * times + b"]" * times


MARKS: Mapping[str, Callable[..., bytes]] = {
    "*text": _text,
    "*list": _list,
    "*keys": _keys,
    "*same": _same,
    "*deep": _deep,
}


def _chunks(content: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(content), size):
        part = content[begin : begin + size]
        yield b"%x\r\n%b\r\n" % (len(part), part)
    yield b"0\r\n\r\n"
