"""The API key: `Authorization: Bearer KEY`, byte for byte, compared in constant time."""

from __future__ import annotations

from hmac import compare_digest
from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler

from hybridtei.server.body import header


async def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard. A coroutine, because the framework sends guards that are none to a thread."""
    check_key(connection.scope, connection.app.state.server.api_key)


def check_key(scope: Any, key: str | None) -> None:
    """To be called before the body is looked at. Raises NotAuthorizedException, which is written without a body."""
    if key is None:
        return
    given = header(scope, b"authorization") or ""
    if not compare_digest(given.encode("latin-1", "replace"), f"Bearer {key}".encode()):
        raise NotAuthorizedException
