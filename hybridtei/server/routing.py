"""The record of a route, and the wire format of its errors.

    @post("/embed", EmbedRequest, list[Vector], capability=EMBED, is_tei=True)
    async def embed(context: Context, request: EmbedRequest) -> Reply:
        \"\"\"Dense vectors, one an input.\"\"\"

`post` and `get` put a `Route` into `ROUTES`. `serve` reads the route, and calls its function with
two arguments: what answers (`Route.source`) and what is asked (`Route.request`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException, MethodNotAllowedException
from msgspec import Struct

from hybridtei import errors
from hybridtei.errors import ErrorType, HybridTeiError, NoKey, Overloaded, anchor_of
from hybridtei.server.answers import Answer, Headers, is_path
from hybridtei.server.http.body import BodyError, ClientDisconnected, first_fields

if TYPE_CHECKING:
    from hybridtei.server.context import Reply
    from hybridtei.server.http.security import KeyRole
    from hybridtei.server.models import Able


AnyRequest = Request[Any, Any, Any]

log = logging.getLogger(__name__)


class ErrorResponse(Struct, frozen=True):
    """Errors of TEI's routes and of hybridtei's own. Errors of a body's schema are plain text.
    Errors of unknown paths and methods, and of keys on TEI's routes, have no body."""

    # False: errors of bodies are plain text
    takes_body_errors: ClassVar[bool] = False

    error: str
    error_type: ErrorType

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        status, message, error_type = facts_of(error)
        return status, cls(message, error_type)


class OpenAICompatErrorResponse(Struct, frozen=True):
    """Errors of OpenAI's, Cohere's and Voyage's embeddings, flat like TEI's."""

    takes_body_errors: ClassVar[bool] = False

    message: str
    code: int
    type: ErrorType

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        status, message, error_type = facts_of(error)
        return status, cls(message, status, error_type)


class OpenAIError(Struct, frozen=True):
    """The cause, where OpenAI's clients read it. `param`: the field that the message names."""

    message: str
    type: ErrorType
    code: str
    param: str | None


class ErrorDetail(Struct, frozen=True):
    """The cause, in the format that clients of FastAPI servers read."""

    loc: list[str]
    msg: str
    type: str


class ClientsErrorResponse(OpenAICompatErrorResponse, frozen=True, kw_only=True):
    """Errors of routes that clients other than TEI's call: flat, and again as OpenAI's clients read
    them (`error`), and as Voyage's do (`detail`)."""

    takes_body_errors: ClassVar[bool] = True

    error: OpenAIError
    detail: str | list[ErrorDetail]

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        status, message, error_type = facts_of(error)
        match = FIELD.search(message) if status in (400, 422) else None
        field_name = None if match is None else match[1]
        cause = OpenAIError(message, error_type, str(status), field_name)
        detail = cls.detail_of(message, error_type)
        return status, cls(message, status, error_type, error=cause, detail=detail)

    @classmethod
    def detail_of(cls, message: str, error_type: ErrorType) -> str | list[ErrorDetail]:
        """The cause under FastAPI's name. Voyage's client reads a text."""
        return message


class ListedErrorResponse(ClientsErrorResponse, frozen=True, kw_only=True):
    """As `ClientsErrorResponse`, for routes of infinity's client, which fails unless `detail` is a
    list."""

    @classmethod
    def detail_of(cls, message: str, error_type: ErrorType) -> str | list[ErrorDetail]:
        """The cause in a list."""
        return [ErrorDetail(["body"], message, error_type)]


# The field that a message begins with: `input[20]` gives input
FIELD = re.compile(r"(?:target type: |field `|^(?:Input validation error: )?`)(\w+)[\[`.:]")


def facts_of(error: Exception) -> tuple[int, str, ErrorType]:
    """The status, message and type of an error, also of one that Litestar or a body raised."""
    if isinstance(error, BodyError):
        return error.status, str(error), "Overloaded" if error.status == 503 else "Validation"
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, "NotFound"
    kind = error if isinstance(error, HybridTeiError) else HybridTeiError
    return kind.http_status, kind.prefix + str(error), kind.error_type


JSON, JSON_LINES = b"application/json", b"application/jsonl"
Source = Literal["model", "models", "store"]
Work = Callable[[Any, Any], Coroutine[Any, Any, "Reply"]]
AnyWork = TypeVar("AnyWork", bound=Work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A method of one or several paths: its function, the requirements before it runs, and the
    format of its errors."""

    paths: Sequence[str]
    methods: Sequence[str]
    work: Work
    # The second argument of `work`. A struct: the decoded body. Several structs, by the field that
    # identifies each: the first is TEI's and the default, the others are other servers'. `bytes`:
    # the body itself. None: the `HttpRequest`, since the body is unread, or there is none.
    request: Any
    # The type of the answer's JSON; None: the answer is no JSON
    answer: Any
    # The media types of bodies and answers other than JSON
    takes: bytes = JSON
    gives: bytes = JSON
    # The first argument of `work`: `Context`, `Models` or `StoreContext`
    source: Source = "model"
    # The name in logs and traces; None: the function opens a span itself, or needs none
    span: str | None = None
    in_schema: bool = True
    # A request without a name gets the first model with the best capability that any model has
    capability: Sequence[Able] = ()
    # The role that a key needs; any: every known key; None: no key is needed
    role: KeyRole | Literal["any"] | None = "infer"
    # The struct of its errors
    error: Any = ErrorResponse
    # Served with --only-tei-routes too
    is_tei: bool = False
    # Served only with TEI's face, instead of another route of the same path
    only_tei: bool = False
    # The body may have any content type, as Ollama's users send it; true wherever `is_peer` is. A
    # page can send JSON only after a preflight, so routes with documents take nothing else
    any_type: bool = False
    # A client may send its key as `token` of the body
    key_in_body: bool = False
    # The function finishes even if the client disconnects
    outlives_client: bool = False
    # False: answered without a free permit, like every GET
    takes_permits: bool = True

    # Inference in the API of another server than TEI: null is an absent field, half a surrogate
    # pair is U+FFFD, and the limits of texts and bytes are that API's
    is_peer: bool = field(init=False)
    # A path of TEI's API and of others: the body's fields tell them apart
    is_shared: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_peer", self.role == "infer" and not self.is_tei)
        object.__setattr__(self, "is_shared", isinstance(self.request, Mapping))

    @property
    def requests(self) -> Sequence[Any]:
        """The structs that it accepts as a body."""
        if self.request in (None, bytes):
            return ()
        return [*self.request.values()] if self.is_shared else [self.request]


# The routes of all imported modules of `server.api`
ROUTES: list[Route] = []


def post(
    path: str | Sequence[str], request: Any, answer: Any, **needs: Any
) -> Callable[[AnyWork], AnyWork]:
    """Register a coroutine function that answers POST. `request`, `answer`, `needs`: fields of
    `Route`. The default of `span` is the function's name."""
    return _registering(path, ("POST",), request, answer, needs)


def get(
    path: str | Sequence[str], answer: Any = None, **needs: Any
) -> Callable[[AnyWork], AnyWork]:
    """Register a coroutine function that answers GET and HEAD."""
    needs = {"role": "any", "span": None, **needs, "takes_permits": False}
    return _registering(path, ("GET", "HEAD"), None, answer, needs)


def _registering(
    path: str | Sequence[str],
    methods: Sequence[str],
    request: Any,
    answer: Any,
    needs: dict[str, Any],
) -> Callable[[AnyWork], AnyWork]:
    paths = (path,) if isinstance(path, str) else tuple(path)

    def register(work: AnyWork) -> AnyWork:
        fields = {"span": work.__name__, **needs, "request": request, "answer": answer}
        ROUTES.append(Route(paths=paths, methods=methods, work=work, **fields))
        return work

    return register


# Fields of the routes of rerankers and classifiers in /v1 and /v2, and of those of embeddings
LISTED: Mapping[str, Any] = {"error": ListedErrorResponse}
FLAT: Mapping[str, Any] = {"error": ClientsErrorResponse}
# Of a path that TEI shares with OpenAI, where the server answers as TEI
TEI_ONLY: Mapping[str, Any] = {
    "error": OpenAICompatErrorResponse,
    "is_tei": True,
    "only_tei": True,
}
PAGE = "/page"
# Statuses after which the connection closes, since the rest of the body is not read
CLOSING = (408, 413, 503)
# Before the paths of one model
BELOW = "/m/{alias:str}"
# In the `opt` of Litestar's handlers
ROUTE, ALLOW = "route", "allow"
PREFLIGHT_METHODS = (b"access-control-allow-methods", b"GET,POST")
# A preflight that asks for more is answered as TEI answers
MAX_ALLOWED_HEADERS_BYTES = 2_000


def preflight_headers(scope: Any, *, as_tei: bool) -> Headers:
    """The fields that allow a page's request: all that it asks for, or TEI's."""
    names = first_fields(scope).get(b"access-control-request-headers", b"")
    if as_tei or not names or len(names) > MAX_ALLOWED_HEADERS_BYTES:
        names = b"content-type"
    return [PREFLIGHT_METHODS, (b"access-control-allow-headers", names)]


def allow_header(methods: Iterable[str]) -> bytes:
    """TEI's `allow` header: HEAD follows GET, and OPTIONS is left out."""
    names = sorted({*methods} - {"HEAD", "OPTIONS"})
    return ",".join("GET,HEAD" if name == "GET" else name for name in names).encode()


def route_of(scope: Any) -> Route | None:
    """The route that a request has reached, if any."""
    handler = scope.get("route_handler")
    return None if handler is None else handler.opt.get(ROUTE)


def request_error(request: AnyRequest, error: Exception) -> Answer:
    """The error in the route's format. A 401 of TEI's routes has no body."""
    route = route_of(request.scope)
    log.error("%.1000s (errors.md#%s)", error, anchor_of(error))
    # Frames keep the request's memory until garbage collection
    clear_frames(error.__traceback__)
    if isinstance(error, NoKey) and (route is None or route.is_tei):
        return Answer(401, [])
    headers = _help(route, error)
    if isinstance(error, NoKey):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, errors.TokensUsed):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    elif isinstance(error, Overloaded) and route is not None and not route.is_tei:
        # TEI sends no such header, but OpenAI's clients obey it: 1 second, its smallest value
        headers.append((b"retry-after", b"1"))
    return _written(route, error, headers)


def body_error(request: AnyRequest, error: BodyError) -> Answer:
    """Plain text, or the route's struct if its clients read nothing else."""
    route = route_of(request.scope)
    clear_frames(error.__traceback__)
    headers = _help(route, error)
    if error.status in CLOSING:
        headers.append((b"connection", b"close"))
    if route is not None and not route.is_tei and route.error.takes_body_errors:
        return _written(route, error, headers)
    return Answer(
        error.status,
        [*headers, (b"content-type", b"text/plain; charset=utf-8")],
        str(error).encode(),
    )


def _help(route: Route | None, error: Exception) -> Headers:
    """Errors of routes other than TEI's link to the page that explains cause and remedy."""
    if route is None or route.is_tei:
        return []
    return [(b"link", f'<{PAGE}/errors.html#{anchor_of(error)}>; rel="help"'.encode())]


def _written(route: Route | None, error: Exception, headers: Headers) -> Answer:
    status, body = (ErrorResponse if route is None else route.error).of(error)
    return Answer(status, [*headers, (b"content-type", JSON)], msgspec.json.encode(body))


def framework_error(request: AnyRequest, error: HTTPException) -> Answer:
    """404, 405 and the like; 405 has the path's methods. Without a body where the server answers as
    TEI. A preflight of an unknown path is answered, too."""
    as_tei = request.app.state.server.as_tei
    if request.method == "OPTIONS":
        return Answer(200, preflight_headers(request.scope, as_tei=as_tei))
    headers: Headers = []
    is_wrong_method = isinstance(error, MethodNotAllowedException)
    if is_wrong_method and is_path(request.scope):
        headers = [(b"allow", allow_header((error.headers or {})["allow"].split(", ")))]
        error = HTTPException(f"{request.method} is not a method of this path", status_code=405)
    elif is_wrong_method or error.status_code == 404:
        error = HTTPException(_unknown_path(request), status_code=404)
    if as_tei:
        return Answer(error.status_code, headers)
    status, message, error_type = facts_of(error)
    body: Struct = ErrorResponse(message, error_type)
    if OPENAI_PATH.match(request.scope["raw_path"]):
        status, body = ClientsErrorResponse.of(error)
    return Answer(status, [*headers, (b"content-type", JSON)], msgspec.json.encode(body))


OPENAI_PATH = re.compile(rb"(/m/[^/]+)?/+(v[12]|embeddings|models)(/|$)")


def _unknown_path(request: AnyRequest) -> str:
    """A sentence with the known path that was probably meant, if there is one: the longest end of
    the path without doubled slashes and capitals."""
    raw = request.scope["raw_path"].decode("latin-1")
    path = f"{raw:.200}"
    names = [name for name in path.lower().split("/") if name]
    below = ""
    if names[:1] == ["m"]:
        below = "/".join(path.split("/")[:3])
        names = names[2:]
    paths = {path for route in ROUTES for path in route.paths}
    for begin in range(len(names)):
        known_path = "/" + "/".join(names[begin:])
        if known_path in paths and below + known_path != path:
            return f"there is no path {path}; {below}{known_path} exists"
    return f"there is no path {path}; /docs lists the paths"


def client_disconnected(request: AnyRequest, error: ClientDisconnected) -> Answer:
    """499, nginx's status for a client that disconnected. No client reads it."""
    return Answer(499, [])


def unforeseen_error(request: AnyRequest, error: Exception) -> Answer:
    """A defect of this server: the traceback goes to the log only."""
    log.critical("unforeseen error on %s", request.scope.get("path"), exc_info=error)
    message = f"internal error: {type(error).__name__}"
    return _written(route_of(request.scope), HybridTeiError(message), [])


HANDLERS: Mapping[Any, Any] = {
    HybridTeiError: request_error,
    BodyError: body_error,
    HTTPException: framework_error,
    ClientDisconnected: client_disconnected,
    Exception: unforeseen_error,
}
