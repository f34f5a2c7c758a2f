"""The requirements of a route, and the wire format of its errors.

One table maps exceptions to status, wire name, and TEI's prefix of the message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException
from litestar.response.base import ASGIResponse
from msgspec import Struct

from hybridtei import errors
from hybridtei.errors import (
    HybridTeiError,
    KeyNeeded,
    NoInputs,
    NoKey,
    NoStore,
    OtherOrigin,
    Overloaded,
    RoleNeeded,
    anchor_of,
)
from hybridtei.server.http.body import BodyError
from hybridtei.server.http.connection import ClientDisconnected

if TYPE_CHECKING:
    from hybridtei.server.http.security import KeyRole
    from hybridtei.server.models import Able


AnyRequest = Request[Any, Any, Any]

log = logging.getLogger(__name__)

ErrorType = Literal[
    "Unhealthy",
    "Backend",
    "Overloaded",
    "Validation",
    "Tokenizer",
    "Empty",
    "NotFound",
    "Unauthorized",
    "Forbidden",
    "Store",
]


@dataclass(frozen=True, slots=True)
class Row:
    """Status, type and message prefix of an exception."""

    status: int
    error_type: ErrorType
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
    NoKey: Row(401, "Unauthorized"),
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
    """The row of an error's class, or of the nearest base class that has one."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), Row(500, "Backend"))


class ErrorResponse(Struct, frozen=True):
    """Errors of TEI's routes and of hybridtei's own. Errors of a body's schema are plain text. Errors of unknown paths and
    methods, and of keys on TEI's routes, have no body."""

    takes_body_errors: ClassVar[bool] = False  # False: errors of bodies are plain text

    error: str
    error_type: ErrorType

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        row = row_of(error)
        return row.status, cls(row.prefix + str(error), row.error_type)


class OpenAICompatErrorResponse(Struct, frozen=True):
    """Errors of OpenAI's, Cohere's and Voyage's embeddings, flat like TEI's."""

    takes_body_errors: ClassVar[bool] = False

    message: str
    code: int
    type: ErrorType

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        row = row_of(error)
        return row.status, cls(row.prefix + str(error), row.status, row.error_type)


class ErrorDetail(Struct, frozen=True):
    """The cause, in the format that clients of FastAPI servers read."""

    loc: list[str]
    msg: str
    type: str


class ListedErrorResponse(OpenAICompatErrorResponse, frozen=True, kw_only=True):
    """Errors of reranking, scoring and classification routes other than TEI's."""

    detail: list[
        ErrorDetail
    ]  # some clients look for this field; infinity's client fails unless it is a list

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        row = row_of(error)
        message = row.prefix + str(error)
        detail = [ErrorDetail(["body"], message, row.error_type)]
        return row.status, cls(message, row.status, row.error_type, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The requirements of a route before its handler runs, and the format of its errors.

    `capability`: a constant of `registry.py`; a request that names no model gets the first model with it.
    `role`: the role that a key needs; any: every known key; None: no key is needed.
    `error`: the struct of its errors, such as `ErrorResponse`.
    `by_field`: if the body may be one of several structs: the field that identifies each. The first is the default.
    """

    capability: Sequence[Able] = ()
    role: KeyRole | Literal["any"] | None = "infer"
    error: Any = ErrorResponse
    by_field: Mapping[str, type[Struct]] | None = None
    is_tei: bool = False  # served with --only-tei-routes too
    only_tei: bool = False  # only with that flag, instead of the `by_field` route of the same path
    needs_content_type: bool = (
        True  # False: it may be missing, since some clients of this route do not send it
    )
    needs_store: bool = False
    key_in_body: bool = False  # a client may send its key as `token` of the body
    takes_lines: bool = False  # the body is JSON lines, which the handler reads in parts
    outlives_client: bool = False  # the handler finishes even if the client disconnects
    takes_permits: bool = True  # False: answered without a free permit, like every GET


ENDPOINT = "endpoint"  # in a handler's `opt`
LISTED: Mapping[str, Any] = {
    "error": ListedErrorResponse,
    "needs_content_type": False,
}  # of rerankers and classifiers in /v1, /v2
FLAT: Mapping[str, Any] = {
    "error": OpenAICompatErrorResponse,
    "needs_content_type": False,
}  # of embeddings in /v1, /v2


PAGE = "/page"
CLOSING = (408, 413, 503)  # the rest of the body is not read
NO_ROUTE = Endpoint(is_tei=True)  # for a request without a route: its errors look like TEI's


def endpoint_of(scope: Any) -> Endpoint:
    """The `Endpoint` of the route that a request reached."""
    handler = scope.get("route_handler")
    return NO_ROUTE if handler is None else handler.opt.get(ENDPOINT, NO_ROUTE)


class StatusOnly(Response[bytes]):
    """A response without body and content type."""

    def __init__(self, status_code: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(b"", status_code=status_code, headers=headers)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIResponse:
        response = super().to_asgi_response(*args, **kwargs)
        del response.headers["content-type"]
        return response


def request_error(request: AnyRequest, error: Exception) -> Response[Any]:
    """The error in the route's format. A 401 of TEI's routes has no body."""
    endpoint = endpoint_of(request.scope)
    log.error("%.1000s (errors.md#%s)", error, anchor_of(error))
    clear_frames(error.__traceback__)  # frames keep the request's memory until garbage collection
    if isinstance(error, NoKey) and endpoint.is_tei:
        return StatusOnly(401)
    headers = _help(endpoint, error)
    if isinstance(error, NoKey):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded):
        is_openai = (
            endpoint.error is OpenAICompatErrorResponse
            and not request.app.state.server.only_tei_routes
        )
        if (
            is_openai or not endpoint.is_tei
        ):  # TEI sends no such header, but OpenAI's clients obey it
            headers["retry-after"] = "1"  # seconds, the header's smallest value
    return _written(endpoint, error, headers)


def body_error(request: AnyRequest, error: BodyError) -> Response[Any]:
    """Plain text, or the route's struct if its clients read nothing else."""
    endpoint = endpoint_of(request.scope)
    clear_frames(error.__traceback__)
    headers = _help(endpoint, error)
    if error.status in CLOSING:
        headers["connection"] = "close"
    if endpoint.error.takes_body_errors:
        return _written(endpoint, error, headers)
    return Response(str(error), status_code=error.status, media_type="text/plain", headers=headers)


def _help(endpoint: Endpoint, error: Exception) -> dict[str, str]:
    """Errors of routes other than TEI's link to the page that explains cause and remedy."""
    return (
        {} if endpoint.is_tei else {"link": f'<{PAGE}/errors.html#{anchor_of(error)}>; rel="help"'}
    )


def _written(endpoint: Endpoint, error: Exception, headers: dict[str, str]) -> Response[bytes]:
    status, body = endpoint.error.of(error)
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


def allow_header(methods: Iterable[str]) -> str:
    """TEI's `allow` header: HEAD follows GET, and OPTIONS is left out."""
    return ",".join(
        "GET,HEAD" if name == "GET" else name for name in sorted({*methods} - {"OPTIONS", "HEAD"})
    )


def framework_error(request: AnyRequest, error: HTTPException) -> Response[bytes]:
    """404, 405 and the like: the status without a body; 405 lists the path's methods."""
    if not isinstance(error, MethodNotAllowedException):
        return StatusOnly(error.status_code)
    methods = (error.headers or {})["allow"].split(", ")
    return StatusOnly(405, {"allow": allow_header(methods)})


def client_disconnected(request: AnyRequest, error: ClientDisconnected) -> Response[bytes]:
    """499, nginx's status for a client that disconnected. No client reads it."""
    return StatusOnly(499)


def unforeseen_error(request: AnyRequest, error: Exception) -> Response[bytes]:
    """A defect of this server: the traceback goes to the log only."""
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
