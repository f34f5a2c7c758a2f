"""Routes over the server's vector store."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from litestar import Request, asgi, post
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from hybridtei.errors import NoStore
from hybridtei.observability.tracing import arrived
from hybridtei.server.api.points import upsert
from hybridtei.server.api.search import PointsRequest, SearchRequest
from hybridtei.server.api.search_answers import Shelf, search
from hybridtei.server.http.auth import Role, check_key
from hybridtei.server.http.body import decode, read_plain
from hybridtei.server.http.edge import ALIAS
from hybridtei.server.routing import models_of, respond, server_of, told, unsent_of, while_connected

T = TypeVar("T", SearchRequest, PointsRequest)


async def asked(scope: Any, receive: Receive, kind: type[T], role: Role) -> tuple[Shelf, T]:
    """What a request is answered with, and what it says. Raises NoStore before the body is looked at, if there is no store."""
    server = server_of(scope)
    check_key(scope, role)
    layouts = scope["app"].state.layouts
    if layouts is None:
        raise NoStore
    unsent_of(scope).check()
    wire = decode(await read_plain(scope, receive, limit=server.payload_limit), kind)
    alias: str | None = scope.get(ALIAS)
    if alias is not None:
        models_of(scope).named(alias)
    if server.otlp_endpoint is not None:
        arrived(scope["app"].state.recorder, scope["headers"])
    return Shelf(models_of(scope), layouts, server, scope["app"].state.store_bounds, alias or wire.model), wire


@asgi("/search", copy_scope=False)
async def search_route(scope: Scope, receive: Receive, send: Send) -> None:
    """POST of a `SearchRequest`."""
    shelf, wire = await asked(scope, receive, SearchRequest, "search")
    await respond(scope, await while_connected(scope, search(shelf, wire)), send)


@post("/collections/{name:str}/points")  # ASGI routes of the framework's cannot hold parts of a path
async def points_route(request: Request[Any, Any, Any]) -> ASGIResponse:
    """POST of a `PointsRequest`. What was begun is stored even if the client goes: it will ask again, for the same ids."""
    shelf, wire = await asked(request.scope, request.receive, PointsRequest, "write")
    reply = await asyncio.shield(upsert(shelf, request.path_params["name"], wire))
    return told(request.scope, reply.answer)


ROUTES = (search_route, points_route)
