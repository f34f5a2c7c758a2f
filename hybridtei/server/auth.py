"""The API key: `Authorization: Bearer KEY`, byte for byte, compared in constant time."""

from __future__ import annotations

from hmac import compare_digest
from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler


def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard: refuses before the body is looked at. Raises NotAuthorizedException, which is written without a body."""
    key = connection.app.state.context.server.api_key
    if key is None:
        return
    given = connection.headers.get("authorization", "")
    if not compare_digest(given.encode("latin-1", "replace"), f"Bearer {key}".encode()):
        raise NotAuthorizedException
