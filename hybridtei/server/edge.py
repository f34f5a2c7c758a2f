"""What TEI does to every request that is one, whatever the route: CORS headers, OPTIONS, HEAD. Plain ASGI, no framework.

What is not HTTP, or beyond the bounds of a head, never comes here: `server.protocol` answers it with a bare status, as
hyper does for TEI. Paths are compared as they are: nothing is stripped from them, and nothing merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridtei.server.body import BodyError
from hybridtei.server.protocol import BROKEN_BODY

VARY = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
ENDING_IN_SLASH = ("/", "/docs/")
PREFLIGHT = ((b"access-control-allow-methods", b"GET,POST"), (b"access-control-allow-headers", b"content-type"))


class BrokenBody(BodyError):
    """Chunks that are none."""

    status = 400
    prefix = "Failed to buffer the request body: error reading a body from connection"


class Edge:
    """Wraps an ASGI application. `methods`: path -> its methods, for OPTIONS."""

    def __init__(self, app: Any, origins: tuple[str, ...], methods: Mapping[str, frozenset[str]]) -> None:
        self._app = app
        self._any_origin = not origins or "*" in origins
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in origins)
        self._allow = {path: allow_header(names).encode() for path, names in methods.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = self._cors(scope["headers"])
        is_head = scope["method"] == "HEAD"
        if scope["method"] == "OPTIONS":
            await self._options(scope["path"], headers, send)
            return

        async def send_with_cors(message: Any) -> None:
            if message["type"] == "http.response.start":
                allow = self._allow_of(scope["path"]) if message["status"] == 405 else []
                message["headers"] = [*message.get("headers", ()), *headers, *allow]
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        async def receive_unbroken() -> Any:
            message = await receive()
            if BROKEN_BODY in (scope.get("extensions") or ()):
                raise BrokenBody
            return message

        path = scope["path"]
        if "//" in path or (path.endswith("/") and path not in ENDING_IN_SLASH):
            await self._not_found(headers, send)  # the framework would strip slashes, TEI does not
            return
        inner = scope
        if path == "/docs/":  # without its slash it would be the redirect to it
            inner = {**scope, "path": "/docs/index.html", "raw_path": b"/docs/index.html"}
        if is_head:  # answered wherever GET is
            inner = {**inner, "method": "GET"}
        await self._app(inner, receive_unbroken, send_with_cors)

    async def _not_found(self, headers: list[tuple[bytes, bytes]], send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [*headers, (b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def _options(self, path: str, headers: list[tuple[bytes, bytes]], send: Any) -> None:
        answer = [*headers, *PREFLIGHT, *self._allow_of(path), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": answer})
        await send({"type": "http.response.body", "body": b""})

    def _allow_of(self, path: str) -> list[tuple[bytes, bytes]]:
        return [(b"allow", self._allow[path])] if path in self._allow else []

    def _cors(self, request_headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        if self._any_origin:
            return [VARY, (b"access-control-allow-origin", b"*")]
        origin = next((value for name, value in request_headers if name == b"origin"), None)
        return [VARY, (b"access-control-allow-origin", origin)] if origin in self._origins else [VARY]


def allow_header(methods: Iterable[str]) -> str:
    """Methods as TEI lists them: HEAD is there wherever GET is, OPTIONS is not named."""
    return ",".join("GET,HEAD" if name == "GET" else name for name in sorted({*methods} - {"OPTIONS", "HEAD"}))
