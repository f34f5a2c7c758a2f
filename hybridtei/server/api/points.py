"""Lists collections, upserts texts, and exports and imports whole collections.

Each text is checked alone, so an error names it and does not affect the others. Texts go through
the engine in chunks, so a large upsert holds no more permits than an ordinary request. Exports
and imports have permits of their own and no time limit: their clients set the pace.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from hybridtei.errors import (
    InvalidInput,
    InvalidPoint,
    RequestError,
    StoreUnavailable,
    UnknownCollection,
)
from hybridtei.inference.tasks.embed import Embed
from hybridtei.models.fingerprint import model_hash
from hybridtei.options import EmbedOptions, Truncate
from hybridtei.outputs import Embeddings, Load, Usage
from hybridtei.retrieval.store.query import Imported, Indexes, indexes_of
from hybridtei.server.context import Context, Reply
from hybridtei.server.models import Asked, StoreContext
from hybridtei.server.routing import JSON_LINES, get, post
from hybridtei.server.serve import HttpRequest
from hybridtei.system.shape import explain

if TYPE_CHECKING:
    from hybridtei.retrieval.store.base import CollectionSchema, PointId, Stored
    from hybridtei.retrieval.store.collection import Searchable


# Points embedded and stored at once; a multi-vector takes some hundred kilobytes
PORTION_POINTS = 32
MAX_SWITCHES = 3


class CollectionList(Struct, frozen=True):
    """Answer of `/collections`: the names of collections and aliases, sorted."""

    collections: list[str]


class PointsRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `/collections/{name}/points`: texts to embed and store."""

    points: Annotated[
        list[Any],
        Meta(
            max_length=1000,
            description="Objects of `id`, `text`, `payload`, `metadata`; none with `index`.",
        ),
    ]
    index: Indexes = ()
    create: Annotated[bool, Meta(description="Create the collection if it does not exist.")] = False
    model: Annotated[
        str | None, Meta(description="Which of several models embeds [default: the collection's].")
    ] = None
    truncate: Truncate = None


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text to store. An id that is not a number or UUID is hashed to a UUID; the payload keeps it
    as `document_id`. Without an id, text, payload and metadata are hashed."""

    text: Annotated[str, Meta(min_length=1)]
    id: int | str | None = None
    payload: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


class FailedPoint(Struct, frozen=True):
    """A point that was not stored: its place in the request, its id if it has one, and the
    error."""

    index: int
    id: int | str | None
    error: str


class PointsResponse(Struct, frozen=True):
    """The outcome of an upsert. `ids`: the ids of the stored points, in the request's order."""

    collection: str
    created: bool
    upserted: int
    ids: list[int | str]
    failed: list[FailedPoint]


@dataclass(frozen=True, slots=True)
class _NewPoint:
    """A valid point: its place in the request, and the id and payload to store."""

    index: int
    client_id: int | str | None
    identity: PointId
    text: str
    payload: dict[str, Any]


@get("/collections", CollectionList, source="store", role="search")
async def collections(stores: StoreContext, request: HttpRequest) -> Reply:
    """The collections of the vector store, and their aliases."""
    store = stores.schemas.store
    names = {*await store.collections(), *await store.aliases()}
    return Reply(CollectionList(sorted(names)))


# It finishes after a disconnect, since the client will send the same ids again.
@post(
    "/collections/{name:str}/points",
    PointsRequest,
    PointsResponse,
    source="store",
    role="write",
    outlives_client=True,
)
async def upsert(stores: StoreContext, request: PointsRequest) -> Reply:
    """Embed every output that the collection holds, and store the points."""
    if not request.points and not request.index:
        raise InvalidInput("`points` is empty")
    return await stores.run(
        max(len(request.points), 1), lambda: _upsert(stores, stores.collection, request)
    )


async def _upsert(stores: StoreContext, name: str, request: PointsRequest) -> Reply:
    """Store the points; store all of them again if a migration switched the alias meanwhile."""
    for _ in range(MAX_SWITCHES):
        reply = await _upserted(stores, name, request)
        if reply is not None:
            return reply
    raise StoreUnavailable(f"collection {name!r} changes its model again and again: try again")


async def _upserted(stores: StoreContext, name: str, request: PointsRequest) -> Reply | None:
    from hybridtei.retrieval.store.plan import budget_of_plan, plan_of

    indexes = indexes_of(request.index)
    context, fit, created = await _collection(stores, name, create=request.create)
    await stores.schemas.store.index(fit.name, indexes)
    new, failed = await asyncio.to_thread(
        _checked, request.points, is_packed=fit.packed is not None
    )
    options = context.settled(
        EmbedOptions(
            truncate=request.truncate,
            input_type="document",
            multivector=budget_of_plan(plan_of(fit.schema)),
        )
    )
    stored: list[PointId] = []
    usages: list[Usage] = []
    for begin in range(0, len(new), PORTION_POINTS):
        portion = new[begin : begin + PORTION_POINTS]
        task = Embed([], fit.heads, options)
        good, embedded, usage = await _embedded(context, portion, task, failed)
        ready: list[Stored] = []
        if embedded is not None and usage is not None:
            usages.append(usage)
            ready = await asyncio.to_thread(_points, good, fit.fitted(embedded), fit.schema, failed)
            bad = {failure.index for failure in failed}
            stored += [point.identity for point in good if point.index not in bad]
        if ready and not await stores.schemas.upsert(name, fit.schema, ready):
            return None
    failed.sort(key=lambda failure: failure.index)
    return Reply(
        PointsResponse(name, created, len(stored), stored, failed),
        Usage.total(usages) if usages else None,
    )


def _points(
    good: Sequence[_NewPoint],
    embedded: Embeddings,
    schema: CollectionSchema,
    failed: list[FailedPoint],
) -> list[Stored]:
    """The valid points; invalid ones go into `failed`. Reads whole payloads, so do not call it on
    the event loop."""
    from hybridtei.retrieval.store.points import check_points, to_points

    ready: list[Stored] = []
    points = to_points(embedded, [item.identity for item in good], [item.payload for item in good])
    for item, point in zip(good, points, strict=True):
        try:
            ready.extend(check_points([point], schema))
        except InvalidPoint as error:
            failed.append(FailedPoint(item.index, item.client_id, str(error)))
    return ready


async def _collection(
    stores: StoreContext, name: str, *, create: bool
) -> tuple[Context, Searchable, bool]:
    """The model, the collection, and True if this call created the collection. Raises
    UnknownCollection, CollectionMismatch."""
    schemas, created = stores.schemas, False
    try:
        schema = await schemas.of(name, writing=True)
        context = stores.embedder(schema)
    except UnknownCollection as error:
        if not create:
            raise UnknownCollection(f"{error}: send `create`: true to create it") from None
        context = stores.embedder(None)
        schema, created = await schemas.collection(name, await _new_schema(context))
    model = Asked(context, is_batch=True)
    fit = await schemas.fit(name, schema, model)
    await schemas.sign(fit, model)
    return context, fit, created


async def _new_schema(context: Context) -> CollectionSchema:
    """The schema of a new collection of a served model."""
    from hybridtei.retrieval.store.plan import new_schema, with_budget
    from hybridtei.retrieval.store.query import CollectionPlan

    config = context.model
    plan = with_budget(CollectionPlan(), config.multivector_tokens, config.multivector_dtype)
    fingerprint = await model_hash(context.fingerprint)
    return new_schema(context.service.model.spec, config.model_id, plan, fingerprint)


def _checked(points: list[Any], *, is_packed: bool) -> tuple[list[_NewPoint], list[FailedPoint]]:
    """The valid points and the others. Reads whole payloads, so do not call it on the event
    loop."""
    from hybridtei.retrieval.store.points import check_key_is_free

    new: list[_NewPoint] = []
    failed: list[FailedPoint] = []
    for index, raw in enumerate(points):
        try:
            point = _read(index, msgspec.convert(raw, Point))
            if is_packed:
                check_key_is_free(point.payload)
            new.append(point)
        except (msgspec.ValidationError, InvalidPoint) as error:
            client_id = raw.get("id") if isinstance(raw, dict) else None
            is_number = type(client_id) is int and _is_writable(client_id)
            if not is_number and not isinstance(client_id, str):
                client_id = None
            reason: object = error
            if isinstance(error, msgspec.ValidationError):
                reason = explain(error, raw, Point)
            failed.append(FailedPoint(index, client_id, f"points[{index}]: {reason}"))
    return _check_once(new, failed), failed


def _read(index: int, point: Point) -> _NewPoint:
    from hybridtei.retrieval.ingest.chunking import DOCUMENT_ID, METADATA, TEXT
    from hybridtei.retrieval.store.points import MAX_ID, point_id, uuid_of

    payload = dict(point.payload)
    if not point.text.strip():
        raise InvalidPoint("`text` is empty")
    payload[TEXT] = point.text
    if point.metadata:
        payload[METADATA] = point.metadata
    if isinstance(point.id, int) and not _is_writable(point.id):
        raise InvalidPoint(f"`id` should be between 0 and {MAX_ID}")
    # The UUID of a text without an id; clients' ids are hashed with 0, so none gives the same UUID
    identity: PointId = point_id(point.text, -1)
    if point.id is None and (point.payload or point.metadata):
        # The same text may stand for two things. Python's encoder writes every number
        content = [point.text, point.payload, point.metadata]
        identity = point_id(json.dumps(content, sort_keys=True), -2)
    if point.id is not None:
        identity = point.id
        if isinstance(identity, str):
            identity = uuid_of(identity) or point_id(identity, 0)
        payload.setdefault(DOCUMENT_ID, str(point.id))
    return _NewPoint(index, point.id, identity, point.text, payload)


def _is_writable(number: int) -> bool:
    """False for integers beyond 64 bits: msgspec reads them, but cannot write them."""
    return -(2**63) <= number < 2**64


def _check_once(points: Sequence[_NewPoint], failed: list[FailedPoint]) -> list[_NewPoint]:
    """The points without those whose ids are there twice, which go into `failed`: the request does
    not say which one to store. The same text and payload twice, without an id, is one point."""
    places: dict[PointId, list[int]] = {}
    for point in points:
        if point.client_id is not None:
            places.setdefault(point.identity, []).append(point.index)
    good = []
    for point in points:
        others = [place for place in places.get(point.identity, ()) if place != point.index]
        if point.client_id is not None and others:
            error = (
                f"points[{point.index}]: `id` {reprlib.repr(point.client_id)} is also that of "
                f"points[{others[0]}]: give each its own"
            )
            failed.append(FailedPoint(point.index, point.client_id, error))
        else:
            good.append(point)
    return good


async def _embedded(
    context: Context, points: list[_NewPoint], task: Embed, failed: list[FailedPoint]
) -> tuple[list[_NewPoint], Embeddings | None, Usage | None]:
    """(the embedded points, their vectors, usage). If the chunk is refused, each point is embedded
    alone."""
    if not points:
        return [], None, None
    texts = [point.text for point in points]
    try:
        load = Load(len(texts), sum(map(len, texts)), is_batch=True)
        return points, *await context.embed_in_chunks(replace(task, inputs=texts), load)
    except RequestError as error:
        if len(points) == 1:
            point = points[0]
            failed.append(
                FailedPoint(point.index, point.client_id, f"points[{point.index}]: {error}")
            )
            return [], None, None
    good: list[_NewPoint] = []
    rows: list[Embeddings] = []
    last: Usage | None = None
    for point in points:
        stored, embedded, usage = await _embedded(context, [point], task, failed)
        if embedded is not None:
            good += stored
            rows.append(embedded)
            last = usage
    return good, Embeddings.concat(rows) if rows else None, last


@get("/collections/{name:str}/export", source="store", role="manage", gives=JSON_LINES)
async def export(stores: StoreContext, request: HttpRequest) -> Reply:
    """Write a collection as JSON lines, with its vectors."""
    return Reply(None, media_type=JSON_LINES, lines=_exported(stores, stores.collection))


async def _exported(stores: StoreContext, name: str) -> AsyncGenerator[bytes]:
    """Raises UnknownCollection, StoreError, Overloaded."""
    from hybridtei.retrieval.store.transfer import exported

    with stores.bounds.transfers.inside(1):
        async for lines in exported(stores.schemas, name):
            yield lines


# It finishes after a disconnect: the client will repeat the import, and points stored by then are
# skipped.
@post(
    "/collections/{name:str}/import",
    None,
    Imported,
    takes=JSON_LINES,
    source="store",
    role="manage",
    outlives_client=True,
)
async def import_lines(stores: StoreContext, request: HttpRequest) -> Reply:
    """Store the points of an export that the collection lacks."""
    from hybridtei.retrieval.store.transfer import import_from

    with stores.bounds.transfers.inside(1):
        return Reply(await import_from(stores.schemas, request.parts(), stores.collection))
