"""The hook that an open-source Qdrant server calls for embeddings, so that `Document`s work against one's own database.

The server sends its token in the body, where others send a header: either will do. A header, which a proxy may add, is the fast
way: a body without one is held to the bounds of `keyless`, and of what it says the token is read first. The server reads
`{"error"}` of a 400 only, so all that the caller could mend is a 400 here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from litestar import Request, Response, asgi
from litestar.types import Receive, Scope, Send

from hybridtei.errors import HybridTeiError, RequestError, RoleNeeded
from hybridtei.observability.tracing import arrived
from hybridtei.server.api.qdrant_inference import InferenceRequest, inference
from hybridtei.server.http.auth import check_key, is_keyless
from hybridtei.server.http.body import BodyError, decode, keys_of, read_plain
from hybridtei.server.http.edge import ALIAS
from hybridtei.server.http.errors import row_of
from hybridtei.server.routing import models_of, respond, server_of, unsent_of, while_connected

PATH = "/qdrant/inference"


def hook_error(request: Request[Any, Any, Any], error: HybridTeiError) -> Response[bytes]:
    """`{"error"}`."""
    mendable = isinstance(error, RequestError) and not isinstance(error, RoleNeeded)
    status = 400 if mendable else row_of(error).status
    return Response(orjson.dumps({"error": str(error)}), status_code=status, media_type="application/json")


def body_error(request: Request[Any, Any, Any], error: BodyError) -> Response[bytes]:
    """`{"error"}`, too."""
    status = 400 if error.status == 422 else error.status
    headers = {"connection": "close"} if error.status in (408, 413, 503) else None  # the rest of it is not wanted
    return Response(orjson.dumps({"error": str(error)}), status_code=status, media_type="application/json", headers=headers)


@asgi(PATH, copy_scope=False, exception_handlers={HybridTeiError: hook_error, BodyError: body_error})
async def hook(scope: Scope, receive: Receive, send: Send) -> None:
    """POST."""
    server = server_of(scope)
    unsent_of(scope).check()
    if is_keyless(scope):
        async with scope["app"].state.keyless.bounded(scope, receive) as receive_bounded:
            body = await read_plain(scope, receive_bounded, limit=server.payload_limit, type_required=False)
        check_key(scope, "infer", keys_of(body, _Token).token)
    else:
        check_key(scope, "infer")
        body = await read_plain(scope, receive, limit=server.payload_limit, type_required=False)
    wire = decode(body, InferenceRequest)
    alias: str | None = scope.get(ALIAS)  # type: ignore[assignment]
    if server.otlp_endpoint is not None:
        arrived(scope["app"].state.recorder, scope["headers"])
    await respond(scope, await while_connected(scope, inference(models_of(scope), alias, wire)), send)


class _Token(msgspec.Struct):
    token: str | None = None


ROUTES = (hook,)
