"""Which pages in browsers may write to the vector store where no key is set.

A page of any site can send requests to whatever server its visitor reaches, and without a key nothing else tells them from
those of a client. Clients that are no browsers send neither header.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from hybridtei.errors import OtherOrigin

OWN = (b"same-origin", b"none")  # none: the user's own doing, such as a bookmark


def check_origin(scope: Any, allowed: Collection[str]) -> None:
    """`allowed`: of `--cors-allow-origin`; beside these, only the server's own pages. Raises OtherOrigin."""
    headers = dict(scope["headers"])
    origin: bytes | None = headers.get(b"origin")
    if origin is None:
        fits = headers.get(b"sec-fetch-site", b"none") in OWN
    else:
        fits = origin.partition(b"://")[2] == headers.get(b"host") or not {"*", origin.decode("latin-1")}.isdisjoint(allowed)
    if not fits:
        raise OtherOrigin


PAGE = "/page"
HTML, XHTML = "text/html", "application/xhtml+xml"
BROWSERS_OWN = (HTML, XHTML, "image/", "*/*")  # what may be valued as much as HTML


def wants_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether `accept` names HTML, and nothing that is no browser's before it or beside it."""
    accept = b",".join(value for name, value in headers if name == b"accept")
    if b"text/html" not in accept.lower():  # health probes end here
        return False
    qualities = dict(_quality(item) for item in accept.decode("latin-1").lower().split(","))
    html = qualities.get(HTML, 0.0)
    rivals = [name for name, quality in qualities.items() if quality >= html and name not in (HTML, XHTML)]
    if not rivals:
        return html > 0
    return html > 0 and XHTML in qualities and all(name.startswith(BROWSERS_OWN) and qualities[name] <= html for name in rivals)


def _quality(item: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in item.split(";"))
    value = next((part[2:] for part in parameters if part.startswith("q=")), "1")
    try:
        return name, float(value)
    except ValueError:
        return name, 0.0


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
