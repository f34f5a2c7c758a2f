"""The way of a request through the server, from its head to its answer: `serve`, and its steps in
their order.

Before it, `http.protocol` has parsed and bounded the head, and Litestar has found the path. After
an error Litestar calls a handler of `routing.HANDLERS`. Nothing else stands between a client's
bytes and a route's function.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from litestar import Request
from litestar.exceptions import NotFoundException
from litestar.types import ASGIApp
from msgspec import Struct

from hybridtei.config import ServerConfig
from hybridtei.errors import KeyNeeded, NoStore, Overloaded
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.limits import (
    BLOCK_BYTES,
    BODY_BYTES_A_SECOND,
    HELD_BYTES,
    KEYLESS_SECONDS,
    MAX_VALUES,
    SMALL_BYTES,
    Bound,
    Holder,
)
from hybridtei.server.answers import (
    Answer,
    Headers,
    Lines,
    Origins,
    is_path,
    piecewise,
    to_json,
)
from hybridtei.server.context import OFFLOAD_NUMBERS, Context, Reply, headers_of
from hybridtei.server.http.body import (
    TURN_BYTES,
    BodyError,
    ClientDisconnected,
    SyntaxRefused,
    body_parts,
    check_size,
    check_type,
    check_values,
    decode,
    decode_peers,
    first_fields,
    in_turn,
    keys_of,
    kind_of,
    model_name,
    read_body,
    while_connected,
)
from hybridtei.server.http.connection import ConnectionLimits
from hybridtei.server.http.security import Certificate, Keyring, check_host, check_origin
from hybridtei.server.models import Models, StoreBounds, StoreContext, split_side
from hybridtei.server.routing import ALLOW, ROUTE, WIRE, Route, preflight_headers
from hybridtei.server.wires import BODY, forget_body
from hybridtei.system.tracing import Recorder, arrived, span

if TYPE_CHECKING:
    from hybridtei.retrieval.store.collection import CollectionSchemas
    from hybridtei.server.agents import Agents
    from hybridtei.server.grpc.server import RpcServer


async def serve(request: HttpRequest) -> ASGIApp:
    """Serve one request: a call for each step, in their order. Raises what the steps raise.
    Litestar sends what it returns."""
    route: Route = request.route_handler.opt[ROUTE]
    scope, shared = request.scope, request.shared
    if not is_path(scope):
        raise NotFoundException

    # What can refuse a request before its body is read
    admit(request, route)
    if shared.recorder is not None:
        arrived(shared.recorder, scope["headers"])

    body = await read(request, route)
    held: Holder | None = None
    work: asyncio.Future[Reply] | None = None
    try:
        # The two arguments of the route's function
        payload, held = await counted(request, route, body)
        source = choose(request, route, body, payload)

        with span(route.span):
            if route.outlives_client:
                work = asyncio.ensure_future(route.work(source, payload))
                reply = await asyncio.shield(work)
            else:
                with while_connected(scope):
                    reply = await route.work(source, payload)
    finally:
        if held is not None and (work is None or work.done()):
            held.leave()
        elif held is not None and work is not None:
            work.add_done_callback(held.leave)

    head = head_of(reply, route, source)
    if reply.lines is not None:
        return Lines(head, reply.lines)
    # A small answer neither waits until others are sent nor delays other requests
    if reply.numbers * BYTES_PER_NUMBER <= SMALL_BYTES:
        content = to_json(reply.answer)
    else:
        content = await encode_large(request, reply)
    # An error until here has the form of the client that sent the body
    if held is not None:
        forget_body(scope)
    return Answer(reply.status, head, content)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What all requests share: the application's `state`."""

    server: ServerConfig
    models: Models
    schemas: CollectionSchemas | None
    store_bounds: StoreBounds
    keyring: Keyring
    # Bytes of bodies that arrive, also without a key in a header, and of decoded ones
    arriving: Bound
    keyless: Bound
    inside: Bound
    origins: Origins
    limits: ConnectionLimits
    recorder: Recorder | None
    rpc: RpcServer | None
    certificate: Certificate | None
    agents: Agents


class HttpRequest(Request[Any, Any, Any]):
    """A request as Litestar has routed it. Functions of routes without a body get it. `alias`: the
    model that the path names. `is_keyless`: the key may be in the body."""

    __slots__ = ("alias", "is_keyless", "shared")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared: Shared = self.scope["litestar_app"].state  # type: ignore[assignment]
        self.alias: str | None = self.scope["path_params"].get("alias")
        self.is_keyless = False

    @property
    def path(self) -> str:
        """The path below `/m/ALIAS`."""
        path: str = self.scope["path"]
        return path if self.alias is None else path.removeprefix(f"/m/{self.alias}")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body in parts. Raises BodyError, ClientDisconnected."""
        try:
            async for part in body_parts(self.scope, self.receive):
                yield part
        except ClientDisconnected:
            self.shared.models.default.metrics.disconnected.add()
            raise


async def preflight(request: HttpRequest) -> ASGIApp:
    """Answer OPTIONS of a known path, for any page."""
    if not is_path(request.scope):
        raise NotFoundException
    allowed = preflight_headers(request.scope, as_tei=request.shared.server.as_tei)
    return Answer(200, [*allowed, (b"allow", request.route_handler.opt[ALLOW])])


def admit(request: HttpRequest, route: Route) -> None:
    """Check key, role, origin, store and capacity. Raises NoKey, RoleNeeded, OtherHost,
    OtherOrigin, KeyNeeded, NoStore, AnswersUnsent, Overloaded."""
    scope, shared, role = request.scope, request.shared, route.role
    if role is None:
        return
    # Pages that may not read answers may not spend the server's time either
    if role == "infer" and shared.server.cors_allow_origin and scope["method"] == "POST":
        check_origin(scope, shared.server.cors_allow_origin)
    if not shared.keyring.is_open:
        authorization = first_fields(scope).get(b"authorization", b"")
        # TEI alone takes no `bearer`
        if not route.is_tei and authorization[:7].lower() == b"bearer ":
            authorization = b"Bearer " + authorization[7:]
        if route.key_in_body and shared.keyring.find_in_header(authorization) is None:
            request.is_keyless = True
            shared.limits.unsent.check()
            return
        shared.keyring.check(authorization, None if role == "any" else role)
    elif role in ("search", "write"):
        check_host(scope, (shared.server.hostname, *shared.server.allowed_host))
        check_origin(scope, shared.server.cors_allow_origin)
    elif role == "manage":
        raise KeyNeeded(request.path)
    if route.source == "store" and shared.schemas is None:
        raise NoStore
    if scope["method"] != "POST":
        return
    if role != "manage":
        shared.limits.unsent.check()
    check_capacity(route, request.alias, shared.models, shared.store_bounds)


# Of routes of other servers than TEI: 2,048 texts of 16 kB, and at most 16 times `--payload-limit`
PEER_BODY_BYTES, PEER_PAYLOADS = 32_000_000, 16


class _Token(Struct):
    """The API key in a body."""

    token: str | None = None


async def read(request: HttpRequest, route: Route) -> bytes:
    """Read the body, if the route's function does not read it. Raises BodyError,
    ClientDisconnected; NoKey if the key was to come in the body."""
    if route.request is None:
        return b""
    shared = request.shared
    limit = shared.server.payload_limit
    is_large = route.is_peer or route.is_shared
    if is_large:
        limit = max(limit, min(PEER_PAYLOADS * limit, PEER_BODY_BYTES))
    if not (is_large or route.any_type):
        check_type(first_fields(request.scope))
    try:
        bound, seconds, rate = shared.arriving, shared.server.body_timeout, BODY_BYTES_A_SECOND
        if request.is_keyless:
            bound, seconds, rate = shared.keyless, KEYLESS_SECONDS, inf
        body = await read_body(request, bound, limit, seconds or inf, rate)
    except ClientDisconnected:
        shared.models.default.metrics.disconnected.add()
        raise
    if not body:
        raise SyntaxRefused("it ends too early (byte 0)")
    if request.is_keyless:
        shared.keyring.check(b"", "infer", keys_of(body, _Token).token)
    return body


def decoded(request: HttpRequest, route: Route, body: bytes) -> Any:
    """The body as the route's function takes it. Raises BodyError."""
    kind = route.request
    if kind is None:
        return request
    if len(body) > MAX_VALUES:
        check_values(body)
    if kind is bytes:
        return body
    is_peer, wire = route.is_peer, route.wire
    scope: Any = request.scope
    scope[BODY] = body
    if route.is_shared:
        kind = kind_of(body, route.request)
        is_peer = kind is not next(iter(route.request.values()))
        if not is_peer:
            check_type(first_fields(scope))
            check_size(len(body), request.shared.server.payload_limit)
        elif route.shared_wire is not None:
            wire = scope[WIRE] = route.shared_wire
    payload = (decode_peers if is_peer else decode)(body, kind)
    if wire.older or wire.forms:
        payload = wire.read(payload)
    return payload


async def counted(request: HttpRequest, route: Route, body: bytes) -> tuple[Any, Holder | None]:
    """The body as the route's function takes it, and the holder of what counts for it until its
    answer: the bytes of the body and of its texts from before it waits for a thread, then the
    memory of its values. Raises BodyError, also if all requests together hold too many."""
    if len(body) <= TURN_BYTES:
        return decoded(request, route, body), None
    if len(body) <= HELD_BYTES:
        return await in_turn(body, decoded, request, route, body), None
    held = request.shared.inside.inside(0)
    held.take(2 * len(body))
    try:
        payload, size = await in_turn(body, weighed, request, route, body)
        held.take(size)
    except BaseException:
        held.leave()
        raise
    return payload, held


def weighed(request: HttpRequest, route: Route, body: bytes) -> tuple[Any, int]:
    """The body as the route's function takes it, and the bytes of its values."""
    before = sys.getallocatedblocks()
    payload = decoded(request, route, body)
    return payload, max(sys.getallocatedblocks() - before, 0) * BLOCK_BYTES


def too_much_inside(bound: Bound) -> BodyError:
    """The refusal of the bound of decoded bodies."""
    return BodyError(
        f"the bodies of other requests hold {bound.units} bytes, {bound.limit} are allowed: "
        "try again later",
        503,
    )


def choose(
    request: HttpRequest, route: Route, body: bytes, payload: Any
) -> Context | Models | StoreContext:
    """What answers: a model, by the path or the body, else the first one with the route's
    capability; all models; or the vector store. Raises UnknownModel."""
    shared, alias = request.shared, request.alias
    models = shared.models
    if route.source == "model":
        name = None
        if body and alias is None:
            # One model takes every name, and reads the side behind it, as TEI does not
            is_named = getattr(payload, "model", body) is not None
            if is_named and not hasattr(payload, "model"):
                is_named = b":query" in body or b":document" in body
            if len(models.entries) > 1 or (is_named and not shared.server.as_tei):
                name = model_name(body, payload)
        chosen = models.choose(alias, name, route.capability)
        return chosen.peers if route.is_peer else chosen
    if route.source == "models":
        return models if alias is None else models.below(alias)
    if alias is not None:
        models.named(alias)
    assert shared.schemas is not None
    named = alias or getattr(payload, "model", None)
    collection = request.scope["path_params"].get("name", "")
    return StoreContext(
        models, shared.schemas, shared.server, shared.store_bounds, named, collection
    )


def head_of(reply: Reply, route: Route, source: Any) -> Headers:
    """The fields of an answer, without its length."""
    head = [*reply.headers]
    if isinstance(source, Context) and not route.is_tei:
        fingerprint = source.fingerprint_header
        if fingerprint is not None:
            head.insert(0, fingerprint)
    if reply.usage is not None:
        head += headers_of(reply.usage)
    if reply.media_type is not None:
        head.append((b"content-type", reply.media_type))
    return head


async def encode_large(request: HttpRequest, reply: Reply) -> bytes:
    """Wait until not too many bytes of answers are unsent, and write the answer. Raises
    AnswersUnsent, ClientDisconnected."""
    unsent = request.shared.limits.unsent
    with while_connected(request.scope):
        reserved = await unsent.room(reply.numbers * BYTES_PER_NUMBER)
    try:
        if reply.numbers > OFFLOAD_NUMBERS:
            return await asyncio.to_thread(piecewise, reply.answer)
        return to_json(reply.answer)
    finally:
        unsent.give_back(reserved)


def check_capacity(route: Route, alias: str | None, models: Models, store: StoreBounds) -> None:
    """Raises Overloaded, before the body is read, if no model that the request can reach has a free
    permit. `alias`: the model that the path names, if any."""
    if not route.takes_permits:
        return
    if route.source == "store":
        return store.admission.check()
    if alias is not None:
        entry = models.entries.get(alias) or models.entries.get(split_side(alias)[0])
        contexts = []
        if entry is not None and entry.context is not None and entry.state == "ready":
            contexts = [entry.context]
    else:
        contexts = models.ready
    for context in contexts:
        if context.service.admission.has_room(1):
            return
    if contexts:
        contexts[0].metrics.refused()
        raise Overloaded
