"""One table: exception -> status, wire name, and the words TEI puts before the message.

Framework errors (unknown route, wrong method) pass through here too, so no body leaks the framework's shape.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.response.base import ASGIResponse

from hybridtei import errors
from hybridtei.errors import KeyNeeded, NoInputs, NoStore, OtherOrigin, RoleNeeded
from hybridtei.server.http.body import BodyError
from hybridtei.server.http.disconnect import ClientDisconnected

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """How an exception looks on the wire."""

    status: int
    error_type: str
    prefix: str = ""


TABLE: Mapping[type[Exception], Row] = {
    errors.EmptyInput: Row(400, "Empty", "Input validation error: "),
    NoInputs: Row(400, "Empty"),
    errors.InvalidInput: Row(422, "Validation", "Input validation error: "),
    errors.RequestRefused: Row(422, "Validation"),
    errors.TokenizerError: Row(422, "Tokenizer"),
    errors.UnsupportedHead: Row(424, "Backend", "Backend error: "),
    errors.UnknownModel: Row(404, "NotFound"),
    errors.UnknownCollection: Row(404, "NotFound"),
    NoStore: Row(404, "NotFound"),
    KeyNeeded: Row(403, "Forbidden"),
    RoleNeeded: Row(403, "Forbidden"),
    OtherOrigin: Row(403, "Forbidden"),
    errors.RequestError: Row(422, "Validation"),
    errors.Overloaded: Row(429, "Overloaded"),
    errors.TimedOut: Row(503, "Overloaded"),
    errors.BackendError: Row(424, "Backend", "Backend error: "),
    errors.NotANumber: Row(424, "Backend"),
    errors.Unhealthy: Row(503, "Unhealthy"),
    errors.StoreUnavailable: Row(503, "Store"),
    errors.CollectionMismatch: Row(409, "Store"),
    errors.InvalidPoint: Row(422, "Validation"),
    errors.StoreError: Row(502, "Store"),
    errors.LoadError: Row(500, "Backend"),
    errors.HybridTeiError: Row(500, "Backend"),
}


def row_of(error: Exception) -> Row:
    """The nearest row of the table."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), Row(500, "Backend"))


def tei_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """`{"error", "error_type"}`."""
    row, message = _told(error)
    return _json(row.status, {"error": message, "error_type": row.error_type})


def openai_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """`{"message", "code", "type"}`, flat."""
    row, message = _told(error)
    return _json(row.status, {"message": message, "code": row.status, "type": row.error_type})


def listed_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """`openai_error`, with `detail` as a list: some clients look for that word, and infinity's fails unless it holds a list."""
    row, message = _told(error)
    detail = [{"loc": ["body"], "msg": message, "type": row.error_type}]
    return _json(row.status, {"message": message, "code": row.status, "type": row.error_type, "detail": detail})


def _told(error: Exception) -> tuple[Row, str]:
    """(row, whole message) of an error that a client is told of; the log hears of it here."""
    log.error("%.1000s", error)
    row = row_of(error)
    return row, row.prefix + str(error)


def body_error(request: Request[Any, Any, Any], error: BodyError) -> Response[str]:
    """Plain text."""
    headers = {"connection": "close"} if error.status in (408, 413) else None
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
    return _json(500, {"error": f"internal error: {type(error).__name__}", "error_type": "Backend"})


def gone(request: Request[Any, Any, Any], error: ClientDisconnected) -> Response[bytes]:
    """The status nginx logs for a client that left; nobody reads it."""
    return StatusOnly(499)


HANDLERS: Mapping[Any, Any] = {
    BodyError: body_error,
    errors.HybridTeiError: tei_error,
    HTTPException: framework_error,
    ClientDisconnected: gone,
    Exception: unforeseen_error,
}


def _json(status: int, content: dict[str, Any]) -> Response[bytes]:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
