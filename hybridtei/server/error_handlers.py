"""Errors -> responses, for every route. A route's `Endpoint` says of which struct its errors are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from traceback import clear_frames
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException
from litestar.response.base import ASGIResponse

from hybridtei.errors import HybridTeiError, NoKey, Overloaded, anchor_of
from hybridtei.server.endpoint import endpoint_of
from hybridtei.server.http.body import BodyError
from hybridtei.server.http.connection import ClientDisconnected
from hybridtei.server.middleware import allow_header
from hybridtei.server.routing import Endpoint, ErrorResponse, asks_to_wait, help_link

AnyRequest = Request[Any, Any, Any]

log = logging.getLogger(__name__)

CLOSING = (408, 413, 503)  # the rest of the body is not read
OF_TEI = Endpoint(is_tei=True)  # of a request that reached no route


class StatusOnly(Response[bytes]):
    """A response without body and content type."""

    def __init__(self, status_code: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(b"", status_code=status_code, headers=headers)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIResponse:
        response = super().to_asgi_response(*args, **kwargs)
        del response.headers["content-type"]
        return response


def request_error(request: AnyRequest, error: Exception) -> Response[Any]:
    """The route's struct; a status alone for TEI's 401."""
    endpoint = endpoint_of(request.scope) or OF_TEI
    log.error("%.1000s (errors.md#%s)", error, anchor_of(error))
    clear_frames(error.__traceback__)  # they hold the request until garbage is collected, beside the next one
    if isinstance(error, NoKey) and endpoint.is_tei:
        return StatusOnly(401)
    headers = _help(endpoint, error)
    if isinstance(error, NoKey):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded) and asks_to_wait(endpoint, only_tei_routes=request.app.state.server.only_tei_routes):
        headers["retry-after"] = "1"  # seconds, the least that the header can say
    return _written(endpoint, error, headers)


def body_error(request: AnyRequest, error: BodyError) -> Response[Any]:
    """Plain text, or the route's struct where its clients read no other."""
    endpoint = endpoint_of(request.scope) or OF_TEI
    clear_frames(error.__traceback__)
    headers = _help(endpoint, error)
    if error.status in CLOSING:
        headers["connection"] = "close"
    if endpoint.error.takes_body_errors:
        return _written(endpoint, error, headers)
    return Response(str(error), status_code=error.status, media_type="text/plain", headers=headers)


def _help(endpoint: Endpoint, error: Exception) -> dict[str, str]:
    return {} if endpoint.is_tei else dict([help_link(error)])


def _written(endpoint: Endpoint, error: Exception, headers: dict[str, str]) -> Response[bytes]:
    status, body = endpoint.error.of(error)
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


def framework_error(request: AnyRequest, error: HTTPException) -> Response[bytes]:
    """404, 405 …: the status alone, and the methods that a path has."""
    if not isinstance(error, MethodNotAllowedException):
        return StatusOnly(error.status_code)
    methods = (error.headers or {})["allow"].split(", ")
    return StatusOnly(405, {"allow": allow_header(methods)})


def client_disconnected(request: AnyRequest, error: ClientDisconnected) -> Response[bytes]:
    """The status that nginx logs for a client that disconnected; no client reads it."""
    return StatusOnly(499)


def unforeseen_error(request: AnyRequest, error: Exception) -> Response[bytes]:
    """A defect of ours: the log has its trace, the answer does not."""
    log.critical("unforeseen error on %s", request.scope.get("path"), exc_info=error)
    body = ErrorResponse(f"internal error: {type(error).__name__}", "Backend")
    return Response(msgspec.json.encode(body), status_code=500, media_type="application/json")


HANDLERS: Mapping[Any, Any] = {
    HybridTeiError: request_error,
    BodyError: body_error,
    HTTPException: framework_error,
    ClientDisconnected: client_disconnected,
    Exception: unforeseen_error,
}
