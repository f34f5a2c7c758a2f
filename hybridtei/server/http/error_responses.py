"""Litestar's exception handlers: an exception -> a response.

Framework errors (unknown route, wrong method) pass through here too, so no body leaks the framework's shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from traceback import clear_frames
from typing import Any

import msgspec
import orjson
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.response.base import ASGIResponse

from hybridtei.errors import HybridTeiError
from hybridtei.server.http.body import BodyError
from hybridtei.server.http.connection import ClientDisconnected
from hybridtei.server.routing import ErrorResponse

log = logging.getLogger(__name__)

CLOSING = (408, 413)  # the rest of the body is not read


def error_handlers(kind: Any) -> dict[Any, Any]:
    """Of a route whose errors are of a struct such as `errors.ErrorResponse`."""
    handlers: dict[Any, Any] = {HybridTeiError: error_handler(kind)}
    if kind.takes_body_errors:
        handlers[BodyError] = handlers[HybridTeiError]
    return handlers


def error_handler(kind: Any) -> Callable[[Request[Any, Any, Any], Exception], Response[bytes]]:
    """What writes an error as such a struct."""

    def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        status, body = kind.of(error)
        clear_frames(error.__traceback__)  # they hold the request until garbage is collected, beside the next one
        closes = isinstance(error, BodyError) and status in (*CLOSING, 503)
        return Response(
            msgspec.json.encode(body),
            status_code=status,
            media_type="application/json",
            headers={"connection": "close"} if closes else None,
        )

    return handle


def body_error(request: Request[Any, Any, Any], error: BodyError) -> Response[str]:
    """Plain text."""
    clear_frames(error.__traceback__)
    headers = {"connection": "close"} if error.status in CLOSING else None
    return Response(str(error), status_code=error.status, media_type="text/plain", headers=headers)


class StatusOnly(Response[bytes]):
    """No body, and so no content type."""

    def __init__(self, status_code: int) -> None:
        super().__init__(b"", status_code=status_code)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIResponse:
        response = super().to_asgi_response(*args, **kwargs)
        del response.headers["content-type"]
        return response


def framework_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """401, 404, 405 …: the status alone; `edge` adds which methods there are."""
    return StatusOnly(error.status_code)


def unforeseen_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """A defect of ours: logged with its trace, told without it."""
    log.critical("unforeseen error on %s", request.scope.get("path"), exc_info=error)
    body = orjson.dumps({"error": f"internal error: {type(error).__name__}", "error_type": "Backend"})
    return Response(body, status_code=500, media_type="application/json")


def gone(request: Request[Any, Any, Any], error: ClientDisconnected) -> Response[bytes]:
    """The status nginx logs for a client that left; nobody reads it."""
    return StatusOnly(499)


HANDLERS: Mapping[Any, Any] = {
    BodyError: body_error,
    HybridTeiError: error_handler(ErrorResponse),
    HTTPException: framework_error,
    ClientDisconnected: gone,
    Exception: unforeseen_error,
}
