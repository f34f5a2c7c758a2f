"""Fetches, deletes and changes stored documents, each whole."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from hybridtei.retrieval.search.options import StoredPoint
from hybridtei.server.context import Reply
from hybridtei.server.models import StoreContext
from hybridtei.server.routing import delete, get, post
from hybridtei.server.serve import HttpRequest

MAX_IDS = 10_000
WRITES: dict[str, Any] = {"source": "store", "role": "write", "outlives_client": True}


class FoundPoints(Struct, frozen=True):
    """The point of an id, or the chunks of the document of an id, in their order."""

    points: list[StoredPoint]


class ChangedPoints(Struct, frozen=True):
    """The number of points of the documents that were deleted or changed."""

    points: int


class SelectionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `/collections/{name}/points/delete`."""

    ids: Annotated[
        Annotated[list[int | str], Meta(min_length=1, max_length=MAX_IDS)] | None,
        Meta(description="Ids of points or of documents. Unknown ones are no error."),
    ] = None
    filter: Annotated[
        Raw | UnsetType,
        Meta(
            description="A filter in Qdrant's format, instead of ids; an empty one is refused.",
            extra_json_schema={"type": "object"},
        ),
    ] = UNSET
    source: Annotated[
        str | None, Meta(description="The file of the ids, where several files have one.")
    ] = None


class PayloadRequest(SelectionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `/collections/{name}/points/payload`."""

    set: Annotated[
        dict[str, Any], Meta(description="Keys of the payload, with new values; null removes one.")
    ]


@get("/collections/{name:str}/points/{identity:path}", FoundPoints, source="store", role="search")
async def fetch(
    stores: StoreContext,
    request: HttpRequest,
) -> Reply:
    """The point of an id, or the chunks of the document of an id."""
    from hybridtei.retrieval.documents import fetched

    identity, source = _named(request)
    schema = await stores.schemas.of(stores.collection)
    name = schema.stored_as or stores.collection
    points = await stores.run(1, lambda: fetched(stores.schemas.store, name, identity, source))
    return Reply({"points": points})


@delete(
    "/collections/{name:str}/points/{identity:path}",
    ChangedPoints,
    **WRITES,
)
async def delete_one(
    stores: StoreContext,
    request: HttpRequest,
) -> Reply:
    """Delete the document of an id, or of a chunk's id, with all its chunks."""
    identity, source = _named(request)
    return await _deleted(stores, SelectionRequest(ids=[identity], source=source))


@post(
    "/collections/{name:str}/points/delete",
    SelectionRequest,
    ChangedPoints,
    **WRITES,
)
async def delete_points(
    stores: StoreContext,
    request: SelectionRequest,
) -> Reply:
    """Delete documents by ids or by a filter, with all their chunks."""
    return await _deleted(stores, request)


@post(
    "/collections/{name:str}/points/payload",
    PayloadRequest,
    ChangedPoints,
    **WRITES,
)
async def change_payload(
    stores: StoreContext,
    request: PayloadRequest,
) -> Reply:
    """Set and remove keys of the payloads of documents, in all their chunks."""
    from hybridtei.retrieval.documents import changed

    selection = _selection(request)
    return await _run(stores, partial(changed, selection=selection, values=request.set))


async def _deleted(
    stores: StoreContext,
    request: SelectionRequest,
) -> Reply:
    from hybridtei.retrieval.documents import deleted

    return await _run(stores, partial(deleted, selection=_selection(request)))


async def _run(
    stores: StoreContext,
    work: Any,
) -> Reply:
    from hybridtei.retrieval.documents import whole

    count = await stores.run(1, lambda: whole(stores.schemas, stores.collection, work))
    return Reply(ChangedPoints(count))


def _selection(request: SelectionRequest) -> Any:
    """Raises InvalidInput."""
    from hybridtei.retrieval.documents import Selection
    from hybridtei.retrieval.store.query import filter_from

    where = None if request.filter is UNSET else filter_from(request.filter)
    return Selection(ids=request.ids, where=where, source=request.source)


def _named(request: HttpRequest) -> tuple[int | str, str | None]:
    """The id of the path, and the source of the query."""
    text = request.scope["path_params"]["identity"].removeprefix("/")
    source = request.query_params.get("source")
    if text.isascii() and text.isdigit():
        return int(text), source
    return text, source
