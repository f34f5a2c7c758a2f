"""HTTP requests of every kind: valid, with a wrong length, chunked, HTTP/1.0, compressed,
pipelined, half sent, or empty."""

import gzip
import json
from collections.abc import Callable, Sequence
from typing import Any

from conformance.fuzz.bodies import GETS, POSTS, Draw
from conformance.fuzz.mutations import mutated
from conformance.fuzz.shot import Shot

# As `Shot.answers`: the bytes may be no request, or several
UNKNOWN = -1
JSON = b"application/json"
METHODS = (b"GET", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"POST")
TYPES = (
    b"application/json; charset=utf-8",
    b"application/json;charset=utf-16",
    b"APPLICATION/JSON",
    b"application/vnd.api+json",
    b"text/plain",
    b"application/msgpack",
    b"multipart/form-data; boundary=x",
    b"",
    b"application/json, text/plain",
    b"\xff",
    b"a/b",
    b"application/x-www-form-urlencoded",
    b"application/grpc",
    b"json",
    b"application/json\tx",
    b";;;",
    b"application/+json",
)
ACCEPTS = (
    b"application/msgpack",
    b"application/x-msgpack;q=0.9, application/json;q=0.1",
    b"*/*",
    b"text/html",
    b"application/json;q=x",
    b",,,;q=",
    b"application/msgpack;q=nan",
    b"application/msgpack;q=-1",
    b"\xe9",
    b"a" * 3000,
)
CODINGS = (
    b"gzip",
    b"gzip",
    b"x-gzip",
    b"zstd",
    b"zstd",
    b"br",
    b"deflate",
    b"identity",
    b"gzip, gzip",
    b"",
    b"\xff",
    b",,",
)
ENCODINGS = (
    b"gzip",
    b"zstd",
    b"gzip, zstd;q=0.5",
    b"br",
    b"identity;q=0",
    b"*",
    b"gzip;q=nan",
    b"zstd;q=inf",
    b"deflate",
)
ODD_PATHS = (
    b"//embed",
    b"/embed/",
    b"/embed//",
    b"/%65mbed",
    b"/embed%00",
    b"/embed%",
    b"/embed%zz",
    b"/embed;a=b",
    b"/./embed",
    b"/m/",
    b"/m//embed",
    b"/m/nobody/embed",
    b"/m/hybrid",
    b"/m/hybrid/",
    b"/m/hybrid//embed",
    b"/m/%F0%9F%99%82/embed",
    b"/m/../embed",
    b"/docs/../../etc/passwd",
    b"/docs/%2e%2e/x",
    b"/docs/a/b/c",
    b"/page/../app.py",
    b"/page/nobody.js",
    b"/page/%2e%2e%2fapp.py",
    b"*",
    b"http://example.com/embed",
    b"/embed?inputs=x&a=%00",
    b"/embed?" + b"a" * 5000,
    b"/\xff\xfe",
    b"/\xe6\x9d\xb1",
    b"/#x",
    b"/" + b"a" * 60_000,
    b"/" + b"a/" * 5000,
    b"/models/load/x",
    b"/v1",
    b"/v1/embeddings/",
    b"/favicon.ico",
    b"/.env",
    b"/m/hybrid/m/hybrid/embed",
)
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 500,
    b"\x00" * 5000,
    b"GET\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"get / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/2.0\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nA b: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
    b"FOO / HTTP/1.1\r\n\r\n",
    b"SSTP_DUPLEX_POST /x HTTP/1.1\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nabc",
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"\xff" * 70_000,
    b"EHLO x\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"GET / HTTP/0.9\r\n\r\n",
    b"GET /\r\n",
    b"POST /embed HTTP/1.1\r\nContent-Length",
    b"G",
)
RARE = {
    b"Authorization": (b"", b"Bearer", b"Bearer \xff", b"Basic eDp5", b"Bearer " + b"k" * 9000),
    b"traceparent": (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-zz", b"\xff" * 55),
    b"Origin": (b"http://x", b"null", b"\xff"),
}
LENGTHS = (
    b"-1",
    b"+5",
    b"1e3",
    b"0x10",
    b"5, 5",
    b"5,6",
    b"99999999999999999999999",
    b"18446744073709551616",
    b" ",
    b"5 5",
    b"five",
    b"\xb2",
)


def request(
    path: bytes,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    method: bytes = b"POST",
    version: bytes = b"1.1",
) -> bytes:
    """Return a valid request with a Content-Length."""
    lines = [
        b"%b %b HTTP/%b" % (method, path, version),
        b"Host: fuzz",
        b"Content-Length: %d" % len(body),
    ]
    return b"\r\n".join([*lines, *(b"%b: %b" % field for field in headers)]) + b"\r\n\r\n" + body


class Generator:
    """Shots made from a seed. `aliases`: of the models; `key`: that the server wants, and mostly
    gets.

    `longest`: words in a text.
    """

    def __init__(
        self,
        seed: str,
        aliases: Sequence[str] = (),
        key: str | None = None,
        longest: int | None = None,
    ) -> None:
        self._draw = Draw(seed)
        self._draw.longest = longest or Draw.longest
        self._aliases = [alias.encode() for alias in aliases]
        self._key = key
        self._routes = [*POSTS]
        self._chances = [1 if route.startswith("/models/") else 5 for route in POSTS]

    def next(self) -> Shot:
        return self._draw.choices(_MAKERS, _SHARES)[0](self)

    def _path(self, route: str) -> bytes:
        below = self._aliases and self._draw.random() < 0.25
        return (b"/m/" + self._draw.choice(self._aliases) if below else b"") + route.encode()

    def _valid(self) -> tuple[bytes, Any]:
        route = self._draw.choices(self._routes, self._chances)[0]
        return self._path(route), POSTS[route](self._draw)

    def _json(self) -> tuple[bytes, bytes]:
        """A path and a body, which is right one time in four."""
        path, value = self._valid()
        return path, json.dumps(value).encode() if self._draw.random() < 0.25 else mutated(
            self._draw, value
        )

    def _headers(self, *, odd: float = 0.1) -> list[tuple[bytes, bytes]]:
        draw = self._draw
        headers = [(b"Content-Type", JSON if draw.random() > odd else draw.choice(TYPES))]
        if self._key is not None and draw.random() < 0.9:
            headers.append((b"Authorization", b"Bearer " + self._key.encode()))
        if draw.random() < odd:
            headers.append((b"Accept", draw.choice(ACCEPTS)))
        if draw.random() < odd:
            headers.append((b"Accept-Encoding", draw.choice(ENCODINGS)))
        headers += [
            (name, draw.choice(values)) for name, values in RARE.items() if draw.random() < odd / 4
        ]
        return headers

    def _post(self) -> bytes:
        path, body = self._json()
        return request(path, body, self._headers())

    def plain(self) -> Shot:
        return Shot("plain", (self._post(),))

    def valid(self) -> Shot:
        path, value = self._valid()
        return Shot("valid", (request(path, json.dumps(value).encode(), self._headers(odd=0.05)),))

    def got(self) -> Shot:
        method, path = (
            self._draw.choice((b"GET", b"GET", b"HEAD")),
            self._path(self._draw.choice(GETS)),
        )
        heads = frozenset({0} if method == b"HEAD" else ())
        return Shot("get", (request(path, b"", self._headers(), method=method),), heads=heads)

    def method(self) -> Shot:
        path, body = self._json()
        method = self._draw.choice(METHODS)
        heads = frozenset({0} if method == b"HEAD" else ())
        return Shot("method", (request(path, body, self._headers(), method=method),), heads=heads)

    def path(self) -> Shot:
        _, body = self._json()
        method = self._draw.choice((b"GET", b"POST"))
        return Shot(
            "path",
            (request(self._draw.choice(ODD_PATHS), body, self._headers(), method=method),),
            answers=UNKNOWN,
        )

    def long_path(self) -> Shot:
        path = b"/" + b"a" * self._draw.choice((65_000, 65_533, 65_534, 70_000, 300_000))
        return Shot("long path", (request(path, b""),), answers=UNKNOWN)

    def headers(self) -> Shot:
        """Return headers that are many, long or unusual."""
        draw = self._draw
        path, body = self._json()
        many = [
            (b"X-%d" % number, b"y") for number in range(draw.choice((90, 96, 99, 101, 500, 3000)))
        ]
        long = [(b"X", b"y" * draw.choice((1000, 60_000, 66_000, 500_000)))]
        names, values = (
            (b"X\x01", b"", b"X Y", b"\xff", b"X:"),
            (b"\x00", b"\x7f", b"\xff", b"", b"a\x0bb"),
        )
        strange = [(draw.choice(names), draw.choice(values))]
        same = [
            (name, value) for name, value in self._headers() for _ in range(draw.choice((2, 3, 40)))
        ]
        return Shot(
            "headers",
            (request(path, body, draw.choice((many, long, strange, same))),),
            answers=UNKNOWN,
        )

    def chunked(self) -> Shot:
        """Chunks of any size, with extensions and trailers."""
        draw = self._draw
        path, body = self._json()
        extension = draw.choice((b"", b"", b";a=b", b";" + b"x" * 200, b';a="\\""'))
        chunks, at = [], 0
        while at < len(body):
            size = draw.choice((1, 7, 100, 5000, 100_000))
            part = body[at : at + size]
            chunks.append(b"%x%b\r\n%b\r\n" % (len(part), extension, part))
            at += size
            if len(chunks) > 300:
                chunks.append(
                    b"%x\r\n%b\r\n" % (len(body) - at, body[at:]) if at < len(body) else b""
                )
                break
        trailer = draw.choice(
            (b"", b"", b"X: y\r\n", b"Content-Length: 5\r\n", b"Content-Encoding: gzip\r\n")
        )
        head = self._head(path, b"Transfer-Encoding: chunked")
        return Shot("chunked", (head + b"".join(chunks) + b"0\r\n" + trailer + b"\r\n",))

    def broken_chunks(self) -> Shot:
        path, body = self._json()
        size = b"%x" % len(body)
        wrong = (
            b"zz\r\n" + body,
            b"-5\r\n" + body,
            size + b"\r\n" + body + b"x\r\n0\r\n\r\n",
            size + b"\n" + body + b"\n0\n\n",
            b"\r\n",
            b"ffffffffffffffffff\r\n" + body,
            b"7fffffff\r\n" + body,
            b"0\r\n",
            size + b";" + b"x" * 200_000 + b"\r\n" + body,
            b"0" * 70_000 + size + b"\r\n" + body,
            size + b"\r\n" + body[:-1],
            b"0\r\n" + b"X: y\r\n" * 300 + b"\r\n",
        )
        head = self._head(path, b"Transfer-Encoding: chunked")
        return Shot("broken chunks", (head + self._draw.choice(wrong),), answers=UNKNOWN)

    def length(self) -> Shot:
        """Return a Content-Length that is wrong, not a number, repeated, or combined with
        chunks."""
        draw = self._draw
        path, body = self._json()
        far = len(body) + draw.choice((1, 100, 3_000_000, 10**12))
        near = max(len(body) - draw.choice((1, 10)), 0)
        true = b"Content-Length: %d" % len(body)
        lines = (
            b"Content-Length: %d" % far,
            b"Content-Length: %d" % near,
            b"Content-Length: " + draw.choice(LENGTHS),
            b"X: y",
            true + b"\r\nContent-Length: %d" % near,
            b"Transfer-Encoding: gzip, chunked",
            b"Transfer-Encoding: x",
            true + b"\r\nTransfer-Encoding: chunked",
            true + b"\r\nTransfer-Encoding: identity",
        )
        return Shot("length", (self._head(path, draw.choice(lines)) + body,), answers=UNKNOWN)

    def ancient(self) -> Shot:
        path, body = self._json()
        more = self._draw.choice(
            ([], [(b"Connection", b"keep-alive")], [(b"Connection", b"close")])
        )
        return Shot("http/1.0", (request(path, body, [*self._headers(), *more], version=b"1.0"),))

    def closing(self) -> Shot:
        path, body = self._json()
        more = self._draw.choice(
            (b"close", b"Keep-Alive, Upgrade", b"close, keep-alive", b"\xff", b"upgrade")
        )
        return Shot("connection", (request(path, body, [*self._headers(), (b"Connection", more)]),))

    def offer(self) -> Shot:
        path, body = self._json()
        words = self._draw.choice((b"h2c", b"websocket", b"TLS/1.0", b""))
        more = (
            (b"Connection", b"Upgrade, HTTP2-Settings"),
            (b"Upgrade", words),
            (b"HTTP2-Settings", b"AAMAAABkAAQ"),
        )
        return Shot("upgrade", (request(path, body, [*self._headers(), *more]),))

    def expecting(self) -> Shot:
        path, body = self._json()
        word = self._draw.choice((b"100-continue", b"200-ok", b""))
        whole = request(path, body, [*self._headers(), (b"Expect", word)])
        return Shot("expect", (whole[: len(whole) - len(body)], body))

    def compressed(self) -> Shot:
        """Return a body with a coding, compressed or not."""
        draw = self._draw
        path, body = self._json()
        headers = [*self._headers(), (b"Content-Encoding", draw.choice(CODINGS))]
        return Shot(
            "compressed",
            (request(path, draw.choice((body, gzip.compress(body, mtime=0))), headers),),
        )

    def large(self) -> Shot:
        """Near the payload limit and above, as one long text, many texts, or nothing but depth."""
        draw = self._draw
        path, value = self._valid()
        # A body may have no field that it must have, or be no object
        if not isinstance(value, dict):
            value = {}
        field = next(iter(value), "model")
        size = draw.choice((60_000, 300_000, 1_900_000, 2_100_000))
        unit = draw.choice(("baka ", "\u0301", "x", "東", "a b "))
        shapes: tuple[Callable[[], bytes], ...] = (
            lambda: json.dumps(
                {**value, field: unit * (size // len(unit.encode()))}, ensure_ascii=False
            ).encode(),
            lambda: json.dumps(
                {**value, field: [unit * 3] * (size // (3 * len(unit) + 4))}
            ).encode(),
            lambda: json.dumps({**value, field: [7] * (size // 3)}).encode(),
            lambda: b'{"%b":' % field.encode() + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
            lambda: b'{"unknown":' + b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6) + b"}",
            lambda: b'{"%b":"' % field.encode() + b"\\u0301" * (size // 6) + b'"}',
            lambda: b"{" + b",".join(b'"k%d":1' % number for number in range(size // 12)) + b"}",
            lambda: b" " * size,
        )
        return Shot("large", (request(path, draw.choice(shapes)(), self._headers()),))

    def pipelined(self) -> Shot:
        count = self._draw.choice((2, 3, 5, 20))
        return Shot("pipelined", (b"".join(self._post() for _ in range(count)),), answers=count)

    def pieces(self) -> Shot:
        """One request in several packets."""
        whole = self._post()
        cuts = sorted(self._draw.randrange(len(whole)) for _ in range(self._draw.choice((1, 2, 5))))
        return Shot(
            "pieces",
            tuple(whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)),
        )

    def garbage(self) -> Shot:
        draw = self._draw
        fixed, noise = draw.choice(GARBAGE), draw.randbytes(draw.choice((1, 20, 500, 3000)))
        spoiled = bytearray(self._post())
        for _ in range(3):
            spoiled[draw.randrange(min(len(spoiled), 150))] = draw.randrange(256)
        return Shot("garbage", (draw.choice((fixed, noise, bytes(spoiled))),), answers=UNKNOWN)

    def cut(self) -> Shot:
        """A client that goes away in the middle, or before its answer."""
        whole = self._post()
        end = self._draw.choice((len(whole), self._draw.randrange(len(whole) + 1)))
        return Shot("leaving", (whole[:end],), 0, leaves=True)

    def _head(self, path: bytes, framing: bytes) -> bytes:
        fields = b"\r\n".join(b"%b: %b" % field for field in self._headers())
        return b"POST %b HTTP/1.1\r\nHost: fuzz\r\n%b\r\n%b\r\n\r\n" % (path, framing, fields)


_WEIGHTS = {
    Generator.plain: 500,
    Generator.valid: 120,
    Generator.got: 25,
    Generator.method: 30,
    Generator.path: 25,
    Generator.long_path: 2,
    Generator.headers: 12,
    Generator.chunked: 25,
    Generator.broken_chunks: 12,
    Generator.length: 20,
    Generator.ancient: 15,
    Generator.closing: 12,
    Generator.offer: 12,
    Generator.expecting: 12,
    Generator.compressed: 30,
    Generator.large: 3,
    Generator.pipelined: 15,
    Generator.pieces: 20,
    Generator.garbage: 25,
    Generator.cut: 20,
}
_MAKERS, _SHARES = [*_WEIGHTS], [*_WEIGHTS.values()]
