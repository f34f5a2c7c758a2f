"""Routes over the server's vector store, and the hook by which a Qdrant server asks for embeddings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar import asgi
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send

from hybridtei.server.answers.points import upsert
from hybridtei.server.answers.search import Shelf, search
from hybridtei.server.auth import check_key
from hybridtei.server.body import decode, read_plain
from hybridtei.server.context import Reply
from hybridtei.server.edge import ALIAS
from hybridtei.server.errors import NoStore
from hybridtei.server.serve import form_of, models_of, respond, server_of, while_connected
from hybridtei.server.tracing import arrived
from hybridtei.server.wire.search import PointsRequest, SearchRequest

T = TypeVar("T")
Act = Callable[[Shelf, dict[str, Any], T], Coroutine[Any, Any, Reply]]


def shelved(path: str, kind: type[T], act: Act[T]) -> ASGIRouteHandler:
    """A route: POST with JSON of `kind` -> what `act` says of it, the server's store, and the parts of the path.

    Raises NoStore, before the body is looked at, where the server has none.
    """

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":  # type: ignore[typeddict-item]
            raise MethodNotAllowedException  # the edge knows no paths with parts
        server = server_of(scope)
        check_key(scope, server.api_key)
        layouts = scope["app"].state.layouts
        if layouts is None:
            raise NoStore
        wire = decode(await read_plain(scope, receive, limit=server.payload_limit), kind)
        named: str | None = scope.get(ALIAS) or getattr(wire, "model", None)  # type: ignore[assignment]
        if server.otlp_endpoint is not None:
            arrived(scope["app"].state.recorder, scope["headers"])
        shelf = Shelf(models_of(scope), layouts, named)
        reply = await while_connected(scope, act(shelf, scope["path_params"], wire))
        await respond(reply, form_of(scope), send)

    return asgi(path, copy_scope=False)(handle)


async def _search(shelf: Shelf, parts: dict[str, Any], request: SearchRequest) -> Reply:
    return await search(shelf, request)


async def _upsert(shelf: Shelf, parts: dict[str, Any], request: PointsRequest) -> Reply:
    return await upsert(shelf, parts["name"], request)


ROUTES = (
    shelved("/search", SearchRequest, _search),
    shelved("/collections/{name:str}/points", PointsRequest, _upsert),
)
