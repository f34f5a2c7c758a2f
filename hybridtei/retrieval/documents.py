"""Fetches, deletes and changes documents of a collection, each whole: a chunk stands for all chunks
of its document."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, structs

from hybridtei.errors import InvalidInput, StoreUnavailable, UnknownDocument
from hybridtei.keywords import check_value
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
from hybridtei.retrieval.store.base import PayloadBudget, PointId, Selector, Store, Stored, pages_of
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.plan import PACKED
from hybridtei.retrieval.store.points import MAX_ID, point_id, uuid_of
from hybridtei.retrieval.store.query import Filter, Match, filter_from

T = TypeVar("T")
KEYS = (DOCUMENT_ID, SOURCE, CHUNK)
# Points of a call to the store, fewer with whole payloads; documents of one filter
PAGE, FEW, DOCUMENTS = 1000, 100, 64
# Bytes that one change may write to all points together
MAX_CHANGED_BYTES = 1_000_000_000
MAX_SWITCHES = 3
# Keys that vectors, identity or the next ingest rest on
FIXED = frozenset(
    {TEXT, DOCUMENT_ID, SOURCE, CHUNK, CHUNKS, START, CONTEXT, DIGEST, SETTINGS, FILE, PACKED}
)


class Selection(Struct, frozen=True):
    """Documents of a collection: by `ids`, of points or documents, or by a filter. `source`: the
    file of documents by id, where several files have one."""

    ids: Sequence[int | str] | None = None
    where: Any = None
    source: str | None = None

    def __post_init__(self) -> None:
        structs.force_setattr(self, "where", filter_from(self.where))
        structs.force_setattr(self, "ids", check_value("ids", self.ids, list[int | str] | None))
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
    store: Store,
    name: str,
    identity: int | str,
    source: str | None = None,
    budget: PayloadBudget | None = None,
) -> list[StoredPoint]:
    """The point of this id, or else the chunks of the document of this id, in their order. Raises
    UnknownDocument, InvalidInput, PayloadsTooLarge."""
    check_value("id", identity, int | str)
    points = await _named(store, name, [identity], source, {"exclude": [PACKED]}, budget=budget)
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
    return await _each(
        store,
        name,
        selection,
        partial(store.delete, name),
    )


async def changed(
    store: Store,
    name: str,
    selection: Selection,
    values: Mapping[str, Any],
) -> int:
    """Set keys of the payloads of documents; None removes a key. Return the number of points.
    Raises InvalidInput for keys that vectors or identity rest on, and for too many bytes in all."""
    fixed = sorted(FIXED & values.keys())
    if fixed:
        raise InvalidInput(
            f"`{fixed[0]}` of a stored point cannot be changed: store the text again instead"
        )
    size = len(json.dumps(values, default=str))
    change = partial(store.set_payload, name, values=values)
    return await _each(store, name, selection, change, size)


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


async def _each(
    store: Store,
    name: str,
    selection: Selection,
    act: Callable[[list[PointId]], Awaitable[None]],
    size: int = 0,
) -> int:
    """Do something with the points of whole documents, page by page. Return their number. `size`:
    the bytes that it writes to each of them. Raises InvalidInput for too many bytes in all."""
    if selection.ids is not None:
        points = await _named(store, name, selection.ids, selection.source)
    else:
        points = await matching(store, name, selection.where)
    # Only a document of several chunks has more points than those
    documents = {
        (point.payload[SOURCE], point.payload[DOCUMENT_ID])
        for point in points
        if point.payload.keys() >= {*KEYS}
    }
    points += await _chunks(store, name, [*documents])
    ids = list(dict.fromkeys(point.id for point in points))
    if size * len(ids) > MAX_CHANGED_BYTES:
        raise InvalidInput(
            f"`set` has {size} bytes for each of {len(ids)} points, {size * len(ids)} in all > "
            f"maximum allowed {MAX_CHANGED_BYTES}"
        )
    for begin in range(0, len(ids), PAGE):
        await act(ids[begin : begin + PAGE])
    return len(ids)


async def _named(
    store: Store,
    name: str,
    ids: Sequence[int | str],
    source: str | None,
    with_payload: Selector = KEYS,
    *,
    budget: PayloadBudget | None = None,
) -> list[Stored]:
    """The points of these ids, or the chunks of the documents of these ids. Raises InvalidInput if
    several files have a document of an id, and no source is named; PayloadsTooLarge."""
    points: list[Stored] = []
    values = {identity: value for value in ids for identity in _identities(value)}
    if source is None:
        points = await store.retrieve(name, [*values], with_payload=with_payload)
    if budget is not None:
        budget.spend(points)
    stored = {values[point.id] for point in points}
    keys = [(source, str(value)) for value in dict.fromkeys(ids) if value not in stored]
    files: dict[str, set[str]] = {}
    for point in await _chunks(store, name, keys, with_payload, budget):
        points.append(point)
        files.setdefault(point.payload[DOCUMENT_ID], set()).add(str(point.payload.get(SOURCE)))
    for value, sources in files.items():
        if len(sources) > 1:
            raise InvalidInput(
                f"several files have a document {value!r:.200}: name one as `source`: "
                f"{', '.join(sorted(sources))}"
            )
    return points


def _identities(value: int | str) -> list[PointId]:
    """The ids of the point that a client or an `Index` stored under its own id; none for a number
    that no point may have."""
    if isinstance(value, int) and not 0 <= value <= MAX_ID:
        return []
    if isinstance(value, int):
        return [value]
    return [point_id(value, 0), *filter(None, [uuid_of(value)])]


async def _chunks(
    store: Store,
    name: str,
    keys: Sequence[tuple[str | None, str]],
    with_payload: Selector = KEYS,
    budget: PayloadBudget | None = None,
) -> list[Stored]:
    """The chunks of documents, each known by its source, or None, and its id."""
    points: list[Stored] = []
    keys = sorted(keys, key=str)
    for begin in range(0, len(keys), DOCUMENTS):
        of_sources: dict[str | None, list[str]] = {}
        for source, document_id in keys[begin : begin + DOCUMENTS]:
            of_sources.setdefault(source, []).append(document_id)
        # A store compares a list of values faster than a condition for each
        group = [of_documents(source, ids) for source, ids in of_sources.items()]
        points += await matching(store, name, Filter(should=group), with_payload, budget)
    return points


def of_documents(
    source: str | None,
    ids: Sequence[int | str],
    *more: Filter,
) -> Filter:
    """The chunks of a source's documents that meet further conditions."""
    conditions = [Filter(key=DOCUMENT_ID, match=Match(any=list(ids))), *more]
    if source:
        conditions.append(Filter(key=SOURCE, match=Match(value=source)))
    return Filter(must=conditions)


async def matching(
    store: Store,
    name: str,
    where: Filter | None,
    with_payload: Selector = KEYS,
    budget: PayloadBudget | None = None,
) -> list[Stored]:
    """All points that meet a filter, in the order of their ids. Raises PayloadsTooLarge."""
    page = PAGE if budget is None else FEW
    points: list[Stored] = []
    async for batch in pages_of(store, name, page, scroll_filter=where, with_payload=with_payload):
        if budget is not None:
            budget.spend(batch)
        points += batch
    return points
