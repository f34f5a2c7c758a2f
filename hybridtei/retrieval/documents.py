"""Fetches, deletes and changes documents of a collection, each whole: a chunk stands for all chunks
of its document."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from hybridtei.errors import InvalidInput, StoreUnavailable, UnknownDocument
from hybridtei.retrieval.ingest.chunking import (
    CHUNK,
    CHUNKS,
    CONTEXT,
    DIGEST,
    DOCUMENT_ID,
    FILE,
    SETTINGS,
    SOURCE,
    START,
    TEXT,
)
from hybridtei.retrieval.search.options import StoredPoint
from hybridtei.retrieval.store.base import PointId, Selector, Store, Stored
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.plan import PACKED
from hybridtei.retrieval.store.points import point_id, uuid_of
from hybridtei.retrieval.store.query import Filter, Match

T = TypeVar("T")
KEYS = (DOCUMENT_ID, SOURCE, CHUNK)
# Points of a call to the store, and documents of one filter
PAGE, DOCUMENTS = 1000, 64
MAX_SWITCHES = 3
# Keys that vectors, identity or the next ingest rest on
FIXED = frozenset(
    {TEXT, DOCUMENT_ID, SOURCE, CHUNK, CHUNKS, START, CONTEXT, DIGEST, SETTINGS, FILE, PACKED}
)


class Selection(Struct, frozen=True, kw_only=True):
    """Documents of a collection: by `ids`, of points or documents, or by a filter. `source`: the
    file of documents by id, where several files have one."""

    ids: Sequence[int | str] | None = None
    where: Filter | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if (self.ids is None) is (self.where is None):
            raise InvalidInput("`ids` or `filter` should be given, and not both")
        if self.where is not None and _is_empty(self.where):
            raise InvalidInput(
                "`filter` is empty, which means every point: give it a condition; `hybridtei "
                "collections delete NAME` deletes a whole collection"
            )


def _is_empty(group: Filter) -> bool:
    """True for a filter without a condition."""
    parts: list[Filter] = []
    for inner in (group.must, group.should, group.must_not):
        if inner is not None:
            parts += inner if isinstance(inner, list) else [inner]
    if group.min_should is not None:
        parts += group.min_should.conditions
    return group.is_group and all(map(_is_empty, parts))


async def fetched(
    store: Store, name: str, identity: int | str, source: str | None = None
) -> list[StoredPoint]:
    """The point of this id, or else the chunks of the document of this id, in their order. Raises
    UnknownDocument, InvalidInput."""
    points = await _named(store, name, [identity], source, with_payload={"exclude": [PACKED]})
    if not points:
        raise UnknownDocument(f"collection `{name}` has no document {identity!r:.200}")
    points.sort(key=lambda point: point.payload.get(CHUNK, 0))
    return [StoredPoint(point.id, point.payload) for point in points]


async def deleted(
    store: Store,
    name: str,
    selection: Selection,
) -> int:
    """Delete documents. Return the number of their points. Ids that do not exist are no error."""
    ids = await _chosen(store, name, selection)
    for begin in range(0, len(ids), PAGE):
        await store.delete(name, ids[begin : begin + PAGE])
    return len(ids)


async def changed(
    store: Store,
    name: str,
    selection: Selection,
    values: Mapping[str, Any],
) -> int:
    """Set keys of the payloads of documents; None removes a key. Return the number of points.
    Raises InvalidInput for keys that vectors or identity rest on."""
    fixed = sorted(FIXED & values.keys())
    if fixed:
        raise InvalidInput(
            f"`{fixed[0]}` of a stored point cannot be changed: store the text again instead"
        )
    ids = await _chosen(store, name, selection)
    for begin in range(0, len(ids), PAGE):
        await store.set_payload(
            name,
            ids[begin : begin + PAGE],
            values,
        )
    return len(ids)


async def whole(
    schemas: CollectionSchemas, name: str, work: Callable[[Store, str], Awaitable[T]]
) -> T:
    """Return the result of `work` on the collection of a name; again if a migration switched the
    name meanwhile. Raises UnknownCollection, StoreUnavailable."""
    for _ in range(MAX_SWITCHES):
        schema = await schemas.of(name, writing=True)
        result = await work(schemas.store, str(schema.stored_as))
        if await schemas.is_current(name, schema):
            return result
    raise StoreUnavailable(f"collection {name!r} changes its model again and again: try again")


async def _chosen(
    store: Store,
    name: str,
    selection: Selection,
) -> list[PointId]:
    """The points of whole documents."""
    if selection.ids is not None:
        points = await _named(store, name, selection.ids, selection.source)
    else:
        points = [point async for point in _pages(store, name, selection.where)]
    ids = {point.id: None for point in points}
    # Only a document of several chunks has more points than those
    documents = {
        (point.payload[SOURCE], point.payload[DOCUMENT_ID])
        for point in points
        if point.payload.keys() >= {*KEYS}
    }
    keys = [*documents]
    for begin in range(0, len(keys), DOCUMENTS):
        of_keys = [_of_document(*key) for key in keys[begin : begin + DOCUMENTS]]
        async for point in _pages(store, name, Filter(should=of_keys)):
            ids[point.id] = None
    return [*ids]


async def _named(
    store: Store,
    name: str,
    ids: Sequence[int | str],
    source: str | None,
    with_payload: Selector = KEYS,
) -> list[Stored]:
    """The points of these ids, or the chunks of the documents of these ids. Raises InvalidInput if
    several files have a document of an id, and no source is named."""
    points: list[Stored] = []
    values = {identity: value for value in ids for identity in _identities(value)}
    if source is None:
        points = await store.retrieve(name, [*values], with_payload=with_payload)
    stored = {values[point.id] for point in points}
    for value in dict.fromkeys(ids):
        if value in stored:
            continue
        where = _of_document(source, str(value))
        chunks = [point async for point in _pages(store, name, where, with_payload)]
        sources = {str(point.payload.get(SOURCE)) for point in chunks}
        if len(sources) > 1:
            raise InvalidInput(
                f"several files have a document {value!r:.200}: name one as `source`: "
                f"{', '.join(sorted(sources))}"
            )
        points += chunks
    return points


def _identities(value: int | str) -> list[PointId]:
    """The ids of the point that a client or an `Index` stored under its own id."""
    if isinstance(value, int):
        return [value]
    return [point_id(value, 0), *filter(None, [uuid_of(value)])]


def _of_document(
    source: str | None,
    document_id: str,
) -> Filter:
    conditions = [Filter(key=DOCUMENT_ID, match=Match(value=document_id))]
    if source is not None:
        conditions.append(Filter(key=SOURCE, match=Match(value=source)))
    return Filter(must=conditions)


async def _pages(
    store: Store,
    name: str,
    where: Filter | None,
    with_payload: Selector = KEYS,
) -> AsyncIterator[Stored]:
    offset: PointId | None = None
    while True:
        points, offset = await store.scroll(
            name,
            limit=PAGE,
            offset=offset,
            scroll_filter=where,
            with_payload=with_payload,
        )
        for point in points:
            yield point
        if offset is None:
            return
