"""The Model Context Protocol: agents search the collections of the store, read documents, and store
texts if they ask for it and their key may."""

from __future__ import annotations

from typing import Any

from hybridtei.limits import BODY_BYTES_A_SECOND, MAX_MCP_BYTES, MAX_MCP_VALUES
from hybridtei.server.context import Reply
from hybridtei.server.http.body import check_type, check_values, first_fields, read_body
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
    limit, seconds = shared.server.payload_limit, shared.server.body_timeout
    writable = WRITABLE in scope["query_string"].split(b"&")
    if not writable:
        limit = min(limit, MAX_MCP_BYTES)
    body = await read_body(
        request,
        shared.arriving,
        limit,
        seconds,
        BODY_BYTES_A_SECOND,
    )
    check_values(body, MAX_MCP_VALUES)
    status, media_type, answer = await shared.agents.call(
        request.app, scope, body, stores.collection, writable=writable
    )
    return Reply(answer, status=status, media_type=media_type)
