"""What is asked of a vector store, in qdrant-client's own types, whichever store it is; and a page of its points.

The types are `qdrant_client.models`: users know them, the server speaks them, and the embedded engine's are made of them in its
process. A store raises only `StoreError` and its kinds, and InvalidInput for a collection's name that no store would take.

A page is the same each time it is asked for: points of equal scores stand in the order of their ids. Qdrant returns points of
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
Selector = bool | Sequence[str]  # all payload keys or vectors, none, or those of these names

DENSE, SPARSE, MULTIVECTOR = "dense", "sparse", "multivector"  # the named vectors of our collections
NAMES = (DENSE, SPARSE, MULTIVECTOR)


@dataclass(frozen=True, slots=True)
class CollectionSchema:
    """How a collection is laid out: named vectors, and whose they are.

    `metadata` holds what must be equal for a query to make sense: the model's id and the hash of its tokenizer.
    """

    vectors: Mapping[str, models.VectorParams]
    sparse: Mapping[str, models.SparseVectorParams]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shard_number: int | None = None
    replication_factor: int | None = None
    on_disk_payload: bool | None = None


class Store(Protocol):
    """A place for collections of points. Every call may raise StoreUnavailable (worth another try later) or StoreError."""

    kind: str  # "server", "embedded" or "memory"

    async def collections(self) -> list[str]:
        """The names of all collections, sorted."""
        ...

    async def describe(self, name: str) -> CollectionSchema | None:
        """How a collection is laid out; None if there is none of this name."""
        ...

    async def create(self, name: str, schema: CollectionSchema) -> None:
        """A new, empty collection."""
        ...

    async def drop(self, name: str) -> None:
        """The collection and all its points are gone; no error if there was none."""
        ...

    async def upsert(self, name: str, points: Sequence[models.PointStruct]) -> None:
        """All are stored and searchable when this returns; each replaces the point of its id whole. Points are checked before
        any is sent (`points.checked`), so a bad one harms nothing: InvalidPoint names it."""
        ...

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
        """Best first. Prefetches, fusion, filters and offsets as in Qdrant's Query API."""
        ...

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[models.Record]:
        """Those of the ids that exist, in no particular order."""
        ...

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: models.Filter | None = None,
        with_payload: bool = True,
        with_vectors: Selector = False,
    ) -> tuple[list[models.Record], PointId | None]:
        """A page in the order of ids, and where the next begins."""
        ...

    async def count(self, name: str, count_filter: models.Filter | None = None) -> int:
        """Exactly how many points."""
        ...

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        """These points are gone."""
        ...

    async def optimize(self, name: str) -> None:
        """Build what makes searches fast, where the store does not by itself."""
        ...

    async def close(self) -> None:
        """Everything written is on disk; nothing may be asked afterwards."""
        ...


SPARES = (4, 100, 1_000)  # so many more than wanted are asked for, one after the other while ties need it
FILLED_AT_ONCE = 100  # points whose payloads and vectors are asked for in one call
LEAN: dict[str, Any] = {"with_payload": False, "with_vector": False}


class PayloadBudget:
    """How many bytes, as JSON, the payloads of one answer may take, however many pages it holds."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    def spend(self, points: Iterable[models.ScoredPoint | models.Record]) -> None:
        """Raises PayloadsTooLarge where these points are more than what is left."""
        self._left -= sum(len(orjson.dumps(point.payload, default=str)) for point in points if point.payload)
        if self._left < 0:
            raise PayloadsTooLarge(
                f"the payloads of the points take more than {self._max_bytes} bytes (max-search-bytes): ask for fewer points "
                "(`limit`, `rerank_limit`), or for some keys of each (`with_payload`)"
            )


def selector(names: Selector) -> bool | list[str]:
    """The selector as qdrant-client takes it."""
    return names if isinstance(names, bool) else list(names)


def id_of(point: models.ScoredPoint | models.Record) -> PointId:
    """Its id; a UUID as text."""
    return point.id if isinstance(point.id, int) else str(point.id)


def sort_points(points: Iterable[models.ScoredPoint]) -> list[models.ScoredPoint]:
    """The best first; of equal scores the lowest id first, numbers before UUIDs."""
    return sorted(points, key=_place)


async def page_of(
    store: Store, collection: str, request: models.QueryRequest, *, budget: PayloadBudget | None = None
) -> list[models.ScoredPoint]:
    """What the request asks for, with ties settled by id, at both ends of the page too.

    Not settled are: more than `SPARES[-1]` equal scores beyond the page, which points of equal scores one leg of a fusion takes
    for its last candidates and how it ranks them, which the store decides, and pages that reach beyond `MAX_LIMIT`.
    Raises what `Store.query` raises; PayloadsTooLarge where there is a `budget`.
    """
    page, is_lean = await _settled(store, collection, request)
    if is_lean:
        return await _filled(store, collection, page, request, budget)
    if budget is not None:
        budget.spend(page)
    return page


async def _settled(store: Store, collection: str, request: models.QueryRequest) -> tuple[list[models.ScoredPoint], bool]:
    """(the page's points, whether they lack payloads and vectors)."""
    offset, limit = request.offset or 0, request.limit or 10
    wanted = offset + limit
    is_large = limit > FILLED_AT_ONCE
    as_asked = request.model_copy(update=LEAN) if is_large else request
    for spare in SPARES:
        is_lean = is_large or offset > 0 or spare > SPARES[0]
        asked = request.model_copy(update={"limit": wanted + spare, "offset": None, **(LEAN if is_lean else {})})
        if wanted + spare > MAX_LIMIT:
            return sort_points(await store.query(collection, as_asked)), is_large
        try:
            points = sort_points(await store.query(collection, asked))
        except StoreUnavailable:
            raise
        except StoreError:  # it may limit how many one asks for; and what is wrong with the request itself is told again
            return sort_points(await store.query(collection, as_asked)), is_large
        if len(points) < wanted + spare or points[-1].score < points[wanted - 1].score:
            break
    return points[offset:wanted], is_lean


async def _filled(
    store: Store,
    collection: str,
    page: list[models.ScoredPoint],
    request: models.QueryRequest,
    budget: PayloadBudget | None,
) -> list[models.ScoredPoint]:
    """With the payloads and vectors that were asked for; without those that have gone meanwhile."""
    with_payload, with_vectors = request.with_payload or False, request.with_vector or False
    if not (with_payload or with_vectors):
        return page
    assert isinstance(with_payload, bool | list)
    assert isinstance(with_vectors, bool | list)
    filled: list[models.ScoredPoint] = []
    for begin in range(0, len(page), FILLED_AT_ONCE):
        points = page[begin : begin + FILLED_AT_ONCE]
        ids = [id_of(point) for point in points]
        records = await store.retrieve(collection, ids, with_payload=with_payload, with_vectors=with_vectors)
        if budget is not None:
            budget.spend(records)
        found = {id_of(record): record for record in records}
        filled += [
            point.model_copy(update={"payload": record.payload, "vector": record.vector})
            for point in points
            if (record := found.get(id_of(point))) is not None
        ]
    return filled


def _place(point: models.ScoredPoint) -> tuple[float, bool, Any]:
    identity = id_of(point)
    return -point.score, isinstance(identity, str), identity
