"""Fetches, deletes and changes stored documents, each whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.retrieval.search.options import StoredPoint, identity_of
from hybridtei.server.context import Reply
from hybridtei.server.models import StoreContext
from hybridtei.server.routing import delete, get, post
from hybridtei.server.serve import HttpRequest

# A store without an index compares each with each point
MAX_IDS = 1_000
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
        Meta(description="Ids of points or of documents. Unknown ids are ignored."),
    ] = None
    filter: Annotated[
        Raw | UnsetType,
        Meta(
            description="A filter in Qdrant's format, instead of ids; an empty one is refused.",
            extra_json_schema={"type": "object"},
        ),
    ] = UNSET
    source: Annotated[
        str | None,
        Meta(description="The file of the documents, if several files have one with an id."),
    ] = None


class PayloadRequest(SelectionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `/collections/{name}/points/payload`."""

    set: Annotated[
        dict[str, Any], Meta(description="Keys of the payload, with new values; null removes one.")
    ]


@get("/collections/{name:str}/points/{identity:path}", FoundPoints, source="store", role="search")
async def fetch(stores: StoreContext, request: HttpRequest) -> Reply:
    """The point of an id, or the chunks of the document of an id."""
    from hybridtei.retrieval.documents import fetched
    from hybridtei.retrieval.store.base import PayloadBudget

    identity, source = _named(request)
    schema = await stores.schemas.of(stores.collection)
    name = schema.stored_as or stores.collection
    budget = PayloadBudget(stores.server.max_search_bytes)
    work = partial(
        fetched,
        stores.schemas.store,
        name,
        identity,
        source,
        budget,
    )
    points = await stores.run(1, work)
    return Reply({"points": points}, numbers=budget.spent // BYTES_PER_NUMBER)


@delete("/collections/{name:str}/points/{identity:path}", ChangedPoints, **WRITES)
async def delete_one(stores: StoreContext, request: HttpRequest) -> Reply:
    """Delete the document of an id, or of a chunk's id, with all its chunks."""
    identity, source = _named(request)
    return await _written(stores, SelectionRequest(ids=[identity], source=source))


@post("/collections/{name:str}/points/delete", SelectionRequest, ChangedPoints, **WRITES)
async def delete_points(stores: StoreContext, request: SelectionRequest) -> Reply:
    """Delete documents by ids or by a filter, with all their chunks."""
    return await _written(stores, request)


@post("/collections/{name:str}/points/payload", PayloadRequest, ChangedPoints, **WRITES)
async def change_payload(stores: StoreContext, request: PayloadRequest) -> Reply:
    """Set and remove keys of the payloads of documents, in all their chunks."""
    return await _written(stores, request, request.set)


async def _written(
    stores: StoreContext,
    request: SelectionRequest,
    values: Mapping[str, Any] | None = None,
) -> Reply:
    """Change the documents, or delete them without `values`. Raises InvalidInput."""
    from hybridtei.retrieval import documents

    selection = documents.Selection(
        request.ids,
        request.filter,
        request.source,
    )
    act = partial(documents.deleted, selection=selection)
    if values is not None:
        act = partial(documents.changed, selection=selection, values=values)
    work = partial(
        documents.whole,
        stores.schemas,
        stores.collection,
        act,
    )
    return Reply(ChangedPoints(await stores.run(1, work)))


def _named(request: HttpRequest) -> tuple[int | str, str | None]:
    """The id of the path, and the source of the query."""
    text = request.scope["path_params"]["identity"].removeprefix("/")
    return identity_of(text), request.query_params.get("source")
