"""The protocol of vector stores, in qdrant-client's own types; and pages of points in a stable order.

The types are `qdrant_client.models`: users know them, the server takes them, and the embedded engine's process converts them.
A store raises only `StoreError` and its kinds, and InvalidInput for a collection's name that no store would take.

A page is the same for each query: points of equal scores stand in the order of their ids. Qdrant returns points of
equal scores in any order, and any of those that straddle the end of a page; in rank fusion such ties are common. So a few more
points are queried than the page holds, and more again where that does not settle it. A later page is queried from the top, ids
only, or a point could stand on two pages or on none. Payloads and vectors are retrieved a hundred points at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from qdrant_client import models

from hybridtei.errors import PayloadsTooLarge, StoreError, StoreUnavailable
from hybridtei.store import MAX_LIMIT

PointId = int | str
# All payload keys or vectors, none, or those of these names; of a payload also all but some.
Selector = bool | Sequence[str] | models.PayloadSelectorExclude

DENSE, SPARSE, MULTIVECTOR = "dense", "sparse", "multivector"  # the named vectors of our collections
NAMES = (DENSE, SPARSE, MULTIVECTOR)


@dataclass(frozen=True, slots=True)
class CollectionSchema:
    """A collection's named vectors, and the model that made them.

    `metadata`: the model's id and the hash of its tokenizer, which must equal those of the model that embeds a query.
    """

    vectors: Mapping[str, models.VectorParams]
    sparse: Mapping[str, models.SparseVectorParams]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shard_number: int | None = None
    replication_factor: int | None = None
    on_disk_payload: bool | None = None
    stored_as: str | None = None  # the collection's own name, where it was found by an alias


class Store(Protocol):
    """Collections of points. Every call may raise StoreUnavailable (worth another try later) or StoreError."""

    kind: str  # "server", "embedded" or "memory"

    async def collections(self) -> list[str]:
        """The names of all collections, sorted."""
        ...

    async def describe(self, name: str) -> CollectionSchema | None:
        """A collection's schema; None if there is none of this name."""
        ...

    async def create(self, name: str, schema: CollectionSchema) -> None:
        """Creates an empty collection."""
        ...

    async def drop(self, name: str) -> None:
        """Deletes a collection and its points; no error if there was none."""
        ...

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Replaces these keys of a collection's metadata, all at once; a None removes its key."""
        ...

    async def aliases(self) -> dict[str, str]:
        """Other names of collections: {alias: collection}."""
        ...

    async def alias(self, name: str, collection: str) -> None:
        """Makes `name` another name of a collection. A collection of that name is deleted. May be repeated."""
        ...

    async def upsert(self, name: str, points: Sequence[models.PointStruct]) -> None:
        """All are stored and searchable when this returns; each replaces the point of its id whole. Points are checked before
        any is sent (`points.check_points`), so a bad one harms nothing: InvalidPoint names it."""
        ...

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
        """Points, the best first. Prefetches, fusion, filters and offsets as in Qdrant's Query API."""
        ...

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[models.Record]:
        """The points of these ids that exist, in no particular order."""
        ...

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: models.Filter | None = None,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> tuple[list[models.Record], PointId | None]:
        """A page in the order of ids, and where the next begins."""
        ...

    async def count(self, name: str, count_filter: models.Filter | None = None) -> int:
        """The exact number of points that match."""
        ...

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        """Deletes points; no error for ids that do not exist."""
        ...

    async def optimize(self, name: str) -> None:
        """Builds indexes, where the store does not by itself."""
        ...

    async def close(self) -> None:
        """Flushes everything to disk; no call is allowed afterwards."""
        ...


SPARES = (4, 100, 1_000)  # points queried beyond the page, one step after the other while ties need it
FILLED_AT_ONCE = 100  # points whose payloads and vectors are retrieved in one call
LEAN: dict[str, Any] = {"with_payload": False, "with_vector": False}


class PayloadBudget:
    """A bound on the payloads of one answer in bytes of JSON, over all its pages."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    @property
    def spent(self) -> int:
        """Bytes of the payloads so far."""
        return self._max_bytes - self._left

    def spend(self, points: Iterable[models.ScoredPoint | models.Record]) -> None:
        """Raises PayloadsTooLarge where these points take more bytes than are left."""
        self._left -= sum(len(orjson.dumps(point.payload, default=str)) for point in points if point.payload)
        if self._left < 0:
            raise PayloadsTooLarge(
                f"the payloads of the points take more than {self._max_bytes} bytes (max-search-bytes): ask for fewer points "
                "(`limit`, `rerank_limit`), or for some keys of each (`with_payload`)"
            )


def selector(names: Selector) -> Any:
    """The selector as qdrant-client takes it."""
    return names if isinstance(names, bool | models.PayloadSelectorExclude) else list(names)


def id_of(point: models.ScoredPoint | models.Record) -> PointId:
    """A point's id; a UUID as text."""
    return point.id if isinstance(point.id, int) else str(point.id)


def sort_points(points: Iterable[models.ScoredPoint]) -> list[models.ScoredPoint]:
    """Points by descending score; of equal scores the lowest id first, numbers before UUIDs."""

    def key(point: models.ScoredPoint) -> tuple[float, bool, Any]:
        identity = id_of(point)
        return -point.score, isinstance(identity, str), identity

    return sorted(points, key=key)


async def page_of(
    store: Store, collection: str, request: models.QueryRequest, *, budget: PayloadBudget | None = None
) -> list[models.ScoredPoint]:
    """The request's points, with ties settled by id, at both ends of the page too.

    Not settled are: more than `SPARES[-1]` equal scores beyond the page, which points of equal scores one leg of a fusion takes
    for its last candidates and how it ranks them, which the store decides, and pages that reach beyond `MAX_LIMIT`.
    Raises what `Store.query` raises; PayloadsTooLarge where there is a `budget`.
    """
    page, is_lean = await _settled(store, collection, request)
    if is_lean:
        payload, vectors = request.with_payload or False, request.with_vector or False
        assert isinstance(payload, bool | list | models.PayloadSelectorExclude)
        assert isinstance(vectors, bool | list)
        return await fill(store, collection, page, payload, vectors, budget=budget)
    if budget is not None:
        budget.spend(page)
    return page


async def _settled(store: Store, collection: str, request: models.QueryRequest) -> tuple[list[models.ScoredPoint], bool]:
    """(the page's points, whether they lack payloads and vectors)."""
    offset, limit = request.offset or 0, request.limit or 10
    end = offset + limit
    is_large = limit > FILLED_AT_ONCE
    exact = request.model_copy(update=LEAN) if is_large else request
    for spare in SPARES:
        is_lean = is_large or offset > 0 or spare > SPARES[0]
        longer = request.model_copy(update={"limit": end + spare, "offset": None, **(LEAN if is_lean else {})})
        if end + spare > MAX_LIMIT:
            return sort_points(await store.query(collection, exact)), is_large
        try:
            points = sort_points(await store.query(collection, longer))
        except StoreUnavailable:
            raise
        except StoreError:  # a server may limit `limit`; a mistake in the request itself is raised again
            return sort_points(await store.query(collection, exact)), is_large
        if len(points) < end + spare or points[-1].score < points[end - 1].score:
            break
    return points[offset:end], is_lean


class Retriever(Protocol):
    """The part of a store that `fill` asks."""

    async def retrieve(
        self, name: str, ids: Sequence[PointId], *, with_payload: Selector = True, with_vectors: Selector = False
    ) -> list[models.Record]: ...


async def fill(
    store: Retriever,
    collection: str,
    page: list[models.ScoredPoint],
    with_payload: Selector,
    with_vectors: Selector,
    *,
    budget: PayloadBudget | None = None,
) -> list[models.ScoredPoint]:
    """The page with payloads and vectors, without points that were deleted meanwhile. Raises what `page_of` raises."""
    if not (with_payload or with_vectors):
        return page
    filled: list[models.ScoredPoint] = []
    for begin in range(0, len(page), FILLED_AT_ONCE):
        points = page[begin : begin + FILLED_AT_ONCE]
        ids = [id_of(point) for point in points]
        records = await store.retrieve(collection, ids, with_payload=with_payload, with_vectors=with_vectors)
        if budget is not None:
            budget.spend(records)
        by_id = {id_of(record): record for record in records}
        filled += [
            point.model_copy(update={"payload": record.payload, "vector": record.vector})
            for point in points
            if (record := by_id.get(id_of(point))) is not None
        ]
    return filled
