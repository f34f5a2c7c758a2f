"""What TEI does to every request that is one, whatever the route: CORS headers, OPTIONS, HEAD, 405. Plain ASGI, no framework.

What is not HTTP, or beyond the bounds of a head, never comes here: `server.protocol` answers it with a bare status, as
hyper does for TEI. Paths are compared as they are: nothing is stripped from them, and nothing merged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from hybridtei.server.http.browsers import PAGE, wants_page

VARY = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
ENDING_IN_SLASH = ("/", "/docs/")
SLICE_BYTES = 262_144
PREFLIGHT = ((b"access-control-allow-methods", b"GET,POST"), (b"access-control-allow-headers", b"content-type"))
EMPTY = (b"content-length", b"0")
ALIASES = {
    ("POST", "/"): "/invocations",
    ("GET", "/docs/"): "/docs/index.html",  # without its slash it would be the redirect to it
}

ALIAS = "hybridtei.alias"  # in a scope: the model that the path named
BELOW = "/m/"  # each model has all routes below its alias there

Headers = list[tuple[bytes, bytes]]


class Edge:
    """Wraps an ASGI application. `methods`: path -> its methods; others are refused before anything else is looked at.

    `below_aliases`: whether routes are also there below `/m/ALIAS`: all but those at `of_process`, which belong to no model,
    and which a proxy in front may guard by their one path.
    """

    def __init__(
        self,
        app: Any,
        origins: tuple[str, ...],
        methods: Mapping[str, frozenset[str]],
        *,
        below_aliases: bool = True,
        of_process: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._any_origin = not origins or "*" in origins
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in origins)
        self._methods = methods
        self._below_aliases = below_aliases
        self._of_process = of_process
        self._allow = {path: [(b"allow", allow_header(names).encode())] for path, names in methods.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        alias, path = split_alias(scope["path"]) if self._below_aliases else (None, scope["path"])
        if alias is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), ALIAS: alias}
        method = scope["method"]
        headers = self._cors(scope["headers"])
        if method == "OPTIONS":
            await _answer(200, [*headers, *PREFLIGHT, *self._allow.get(path, ())], send)
            return
        misplaced = alias is not None and path in self._of_process
        if misplaced or "//" in path or (path.endswith("/") and path not in ENDING_IN_SLASH):
            await _answer(404, headers, send)  # the framework would strip slashes, TEI does not
            return
        is_head = method == "HEAD"
        if is_head:  # answered wherever GET is
            method = "GET"
        route = self._route(path)
        if route is not None and method not in self._methods[route]:
            await _answer(405, [*headers, *self._allow[route]], send)
            return
        path = ALIASES.get((method, path), path)
        if path == "/" and not is_head and PAGE in self._methods and wants_page(scope["headers"]):
            path = PAGE

        async def send_with_cors(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            if len(message.get("body", b"")) > SLICE_BYTES:
                await _send_sliced(message, send)
            else:
                await send(message)

        if is_head or path is not scope["path"]:
            scope = {**scope, "method": method, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send_with_cors)

    def _route(self, path: str) -> str | None:
        """The path as it was registered, with parameters such as `{name:str}`; None for one that nobody serves."""
        if path in self._methods:
            return path
        return next((route for route in self._methods if "{" in route and _pattern(route).fullmatch(path)), None)

    def _cors(self, request_headers: Headers) -> Headers:
        if self._any_origin:
            return [VARY, (b"access-control-allow-origin", b"*")]
        origin = next((value for name, value in request_headers if name == b"origin"), None)
        return [VARY, (b"access-control-allow-origin", origin)] if origin in self._origins else [VARY]


@cache
def _pattern(route: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+:(\w+)\}", lambda found: ".+" if found[1] == "path" else "[^/]+", route))


def split_alias(path: str) -> tuple[str | None, str]:
    """`/m/name/embed` -> ("name", "/embed"); any other path as it is."""
    if not path.startswith(BELOW):
        return None, path
    alias, _, rest = path[len(BELOW) :].partition("/")
    return alias, f"/{rest}"


async def _send_sliced(message: Any, send: Any) -> None:
    """A large body slice by slice: `send` waits until the system took the slice before, so that no second copy is kept."""
    body, more = memoryview(message["body"]), message.get("more_body", False)
    for begin in range(0, len(body), SLICE_BYTES):
        end = begin + SLICE_BYTES
        await send({"type": "http.response.body", "body": body[begin:end], "more_body": more or end < len(body)})
        await asyncio.sleep(0)  # a client that reads fast would keep all others waiting


async def _answer(status: int, headers: Headers, send: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, EMPTY]})
    await send({"type": "http.response.body", "body": b""})


def allow_header(methods: Iterable[str]) -> str:
    """Methods as TEI lists them: HEAD is there wherever GET is, OPTIONS is not named."""
    return ",".join("GET,HEAD" if name == "GET" else name for name in sorted({*methods} - {"OPTIONS", "HEAD"}))
