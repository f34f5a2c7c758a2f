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
from itertools import groupby
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException, MethodNotAllowedException

from hybridtei import errors
from hybridtei.errors import HybridTeiError, NoKey, Overloaded, UnsupportedHead, anchor_of
from hybridtei.server.answers import Answer, Headers, is_path
from hybridtei.server.http.body import BodyError, ClientDisconnected, first_fields
from hybridtei.server.wires import (
    TEI,
    ClientsErrorResponse,
    ErrorResponse,
    Wire,
    error_form,
    forget_body,
)

if TYPE_CHECKING:
    from hybridtei.server.context import Reply
    from hybridtei.server.http.security import KeyRole
    from hybridtei.server.models import Able


AnyRequest = Request[Any, Any, Any]

log = logging.getLogger(__name__)


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
    # What it answers as the servers do whose clients call it
    wire: Wire = TEI
    # The same for the structs of `request` after the first
    shared_wire: Wire | None = None
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


def delete(path: str, answer: Any, **needs: Any) -> Callable[[AnyWork], AnyWork]:
    """Register a coroutine function that answers DELETE."""
    return _registering(path, ("DELETE",), None, answer, needs)


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


PAGE = "/page"
# Statuses after which the connection closes, since the rest of the body is not read
CLOSING = (408, 413, 503)
# Before the paths of one model
BELOW = "/m/{alias:str}"
# In the `opt` of Litestar's handlers
ROUTE, ALLOW = "route", "allow"
# In a scope: the row of a request in another API than its route's first
WIRE = "hybridtei.wire"
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


def _is_teis(scope: Any) -> bool:
    """True if a request is answered as TEI does, or reached no route."""
    route = route_of(scope)
    return route is None or (route.is_tei and WIRE not in scope)


def request_error(request: AnyRequest, error: Exception) -> Answer:
    """The error in the route's format. A 401 of TEI's routes has no body."""
    route = route_of(request.scope)
    if isinstance(error, UnsupportedHead) and route is not None:
        error = request.app.state.models.advised(error, route.capability)
    log.error("%.1000s (errors.md#%s)", error, anchor_of(error))
    # Frames keep the request's memory until garbage collection
    clear_frames(error.__traceback__)
    is_teis = _is_teis(request.scope)
    if isinstance(error, NoKey) and is_teis:
        return Answer(401, [])
    headers = _help(request.scope, error)
    if isinstance(error, NoKey):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, errors.TokensUsed):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    elif isinstance(error, Overloaded) and not is_teis:
        # TEI sends no such header, but OpenAI's clients obey it: 1 second, its smallest value
        headers.append((b"retry-after", b"1"))
    return _written(request.scope, error, headers)


def body_error(request: AnyRequest, error: BodyError) -> Answer:
    """Plain text, or the route's struct if its clients read nothing else."""
    scope = request.scope
    clear_frames(error.__traceback__)
    headers = _help(scope, error)
    if error.status in CLOSING:
        headers.append((b"connection", b"close"))
    if not _is_teis(scope) and _form(scope).takes_body_errors:
        return _written(scope, error, headers)
    forget_body(scope)
    return Answer(
        error.status,
        [*headers, (b"content-type", b"text/plain; charset=utf-8")],
        str(error).encode(),
    )


def _help(scope: Any, error: Exception) -> Headers:
    """Errors of routes other than TEI's link to the page that explains cause and remedy."""
    if _is_teis(scope):
        return []
    return [(b"link", f'<{PAGE}/errors.html#{anchor_of(error)}>; rel="help"'.encode())]


def _form(scope: Any) -> Any:
    """The struct of a request's errors."""
    route = route_of(scope)
    form = (scope.get(WIRE) or (TEI if route is None else route.wire)).error
    if _is_teis(scope):
        return form
    return error_form(scope, form)


def _written(scope: Any, error: Exception, headers: Headers) -> Answer:
    status, body = _form(scope).of(error)
    forget_body(scope)
    return Answer(status, [*headers, (b"content-type", JSON)], msgspec.json.encode(body))


def framework_error(request: AnyRequest, error: HTTPException) -> Answer:
    """404, 405 and the like; 405 has the path's methods. Without a body where the server answers as
    TEI. A preflight of an unknown path is answered, too."""
    scope, as_tei = request.scope, request.app.state.server.as_tei
    if request.method == "OPTIONS":
        return Answer(200, preflight_headers(scope, as_tei=as_tei))
    headers: Headers = []
    is_wrong_method = isinstance(error, MethodNotAllowedException)
    path, meant, form = _meant(scope["raw_path"])
    if is_wrong_method and is_path(scope):
        headers = [(b"allow", allow_header((error.headers or {})["allow"].split(", ")))]
        error = HTTPException(f"{request.method} is not a method of this path", status_code=405)
    elif is_wrong_method or error.status_code == 404:
        hint = "/docs lists the paths" if meant in (None, path) else f"{meant} exists"
        error = HTTPException(f"there is no path {path}; {hint}", status_code=404)
    if as_tei:
        return Answer(error.status_code, headers)
    status, body = error_form(scope, form).of(error)
    return Answer(status, [*headers, (b"content-type", JSON)], msgspec.json.encode(body))


# Unknown paths that OpenAI's clients ask for
OPENAI_PATH = re.compile(r"/(v[12]|openai|embeddings|models|completions)(/|$)")


def _meant(raw_path: bytes) -> tuple[str, str | None, Any]:
    """A path, the known path that was probably meant, and the form of that one's errors. It is the
    longest end of the path without capitals and without names that follow themselves: a client adds
    `/embeddings` to its base address, `…/v1/embeddings`."""
    path = f"{raw_path.decode('latin-1'):.200}"
    below, end = "", path.lower()
    if end.startswith("/m/"):
        below = "/".join(path.split("/")[:3])
        end = end[len(below) :]
    names = [name for name, _ in groupby(filter(None, end.split("/")))]
    routes = {path: route for route in ROUTES if not route.only_tei for path in route.paths}
    for begin in range(len(names)):
        known_path = "/" + "/".join(names[begin:])
        if known_path in routes:
            route = routes[known_path]
            return path, below + known_path, (route.shared_wire or route.wire).error
    if OPENAI_PATH.search(path):
        return path, None, ClientsErrorResponse
    return path, None, ErrorResponse


def client_disconnected(request: AnyRequest, error: ClientDisconnected) -> Answer:
    """499, nginx's status for a client that disconnected. No client reads it."""
    return Answer(499, [])


def unforeseen_error(request: AnyRequest, error: Exception) -> Answer:
    """A defect of this server: the traceback goes to the log only."""
    log.critical("unforeseen error on %s", request.scope.get("path"), exc_info=error)
    message = f"internal error: {type(error).__name__}"
    return _written(request.scope, HybridTeiError(message), [])


HANDLERS: Mapping[Any, Any] = {
    HybridTeiError: request_error,
    BodyError: body_error,
    HTTPException: framework_error,
    ClientDisconnected: client_disconnected,
    Exception: unforeseen_error,
}
