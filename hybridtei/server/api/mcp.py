"""The Model Context Protocol: agents search the collections of the store, read documents, and store
texts if they ask for it and their key may."""

from __future__ import annotations

from typing import Any

from hybridtei.server.context import Reply
from hybridtei.server.http.body import check_type, first_fields, read_body
from hybridtei.server.http.security import check_origin
from hybridtei.server.models import StoreContext
from hybridtei.server.routing import post
from hybridtei.server.serve import HttpRequest

WRITABLE = b"writable=true"


@post(
    ["/mcp", "/collections/{name:str}/mcp"],
    None,
    dict[str, Any],
    in_schema=False,
    role="search",
    source="store",
)
async def mcp(stores: StoreContext, request: HttpRequest) -> Reply:
    """Messages of the Model Context Protocol (streamable HTTP, without sessions): tools that search
    and read; with `?writable=true` also `store`. Below a collection, calls that name none use
    it."""
    scope, shared = request.scope, request.shared
    # A key protects against pages too, but MCP asks for both
    check_origin(scope, shared.server.cors_allow_origin)
    check_type(first_fields(scope))
    limit = shared.server.payload_limit
    body = await read_body(scope, request.receive, shared.arriving, limit)
    writable = WRITABLE in scope["query_string"].split(b"&")
    status, media_type, answer = await shared.agents.call(
        request.app, scope, body, stores.collection, writable=writable
    )
    return Reply(answer, status=status, media_type=media_type)
