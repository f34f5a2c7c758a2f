"""What a route is. Of these are made: Litestar's routes, methods, roles of keys, error bodies and OpenAPI's document.

Imports no web framework, so that the request structs, which stand beside their routes, can be used without one. `dispatch`
makes Litestar's routes of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hybridtei.server.http.errors import ErrorResponse

if TYPE_CHECKING:
    from hybridtei.server.http.auth import Role
    from hybridtei.server.registry import Able


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path, and what answers it.

    `handler`: a coroutine function that returns a `Reply`, or a `Content`. It is called with what `target` says, the path's
    parameters, and the request; that of a GET with the scope alone.
    `target`: model: the `Context` that `capability` chooses; models: `Models`, and the alias in the path, if any; store: the
    vector store, without which the route is refused.
    `request`: the struct that the body is decoded to. A tuple of structs: the handler is given the bytes, and chooses.
    `response`: a type, or several, one of which it is; `response_name`: TEI's name for it.
    `role`: that the key should have; any: every key will do; None: none is needed.
    `summary`: of OpenAPI's document, which leaves out a route that has none.
    """

    path: str
    handler: Callable[..., Any]
    method: Literal["GET", "POST"] = "POST"
    request: Any = None
    response: Any = None
    response_name: str | None = None
    summary: str = ""
    target: Literal["model", "models", "store"] = "model"
    capability: Sequence[Able] = ()
    role: Role | Literal["any"] | None = "infer"
    error: Any = ErrorResponse
    is_tei: bool = False  # TEI has it too: it is there with --only-tei-routes
    needs_content_type: bool = True  # False: a missing one passes, because some clients of this route send none
    key_in_body: bool = False  # a client may send its key as `token` of the body
    outlives_client: bool = False  # what was begun is finished even if the client disconnects


@dataclass(frozen=True, slots=True)
class Content:
    """An answer of bytes, whose form the client does not choose."""

    body: bytes = b""
    media_type: str | None = None
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()
