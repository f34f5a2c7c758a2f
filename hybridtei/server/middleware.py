"""Around the application: model aliases in paths, cross-origin headers, and paths that the framework would normalise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from litestar.types import ASGIApp, Receive, Send

from hybridtei.server.http.body import first_fields
from hybridtei.server.http.security import Origins
from hybridtei.server.routing import ALIAS, split_alias

ENDING_IN_SLASH = ("/", "/docs/")
PREFLIGHT = ((b"access-control-allow-methods", b"GET,POST"), (b"access-control-allow-headers", b"content-type"))


class HttpMiddleware:
    """Wraps an ASGI application.

    `below_aliases`: routes are also there below `/m/ALIAS`, all but those at `of_process`: they belong to no model, and a proxy
    in front may guard them by their one path. `methods`: of each path, for preflights.
    """

    def __init__(
        self,
        app: ASGIApp,
        origins: Origins,
        *,
        below_aliases: bool,
        of_process: Collection[str],
        methods: Mapping[str, Collection[str]],
    ) -> None:
        self._app = app
        self._origins = origins
        self._below_aliases = below_aliases
        self._of_process = of_process
        self._allow = {path: [(b"allow", allow_header(names).encode())] for path, names in methods.items()}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = self._origins.headers(first_fields(scope).get(b"origin"))
        alias, path = split_alias(scope["path"]) if self._below_aliases else (None, scope["path"])
        if scope["method"] == "OPTIONS":
            await _bare(200, [*headers, *PREFLIGHT, *self._allow.get(path, ())], send)
            return
        misplaced = alias is not None and path in self._of_process
        if misplaced or "//" in path or (path.endswith("/") and path not in ENDING_IN_SLASH):
            await _bare(404, headers, send)  # the framework would strip slashes, TEI does not
            return
        if alias is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), ALIAS: alias}

        async def send_with_cors(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_cors)


def allow_header(methods: Iterable[str]) -> str:
    """Methods as TEI lists them: HEAD is there wherever GET is, OPTIONS is not named."""
    return ",".join("GET,HEAD" if name == "GET" else name for name in sorted({*methods} - {"OPTIONS", "HEAD"}))


async def _bare(status: int, headers: list[tuple[bytes, bytes]], send: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
