"""The protocol of vector stores; and points in a stable order.

New points and schemas are `qdrant_client.models`: users know them and the server takes them. Queries and filters are our own,
from `store.query`, and so are the points of answers: to make qdrant-client's models of them took half of a search.
A store raises only `StoreError` and its kinds, and InvalidInput for a collection's name that no store would take.

Points of equal scores stand in the order of their ids. Qdrant returns them in any order, and any of those that straddle the end
of what is asked for; so a few more points are queried, and more again where that does not settle it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import orjson
from msgspec import Struct
from msgspec.structs import replace
from qdrant_client import models

from hybridtei.errors import PayloadsTooLarge, StoreError, StoreUnavailable
from hybridtei.retrieval.store.query import MAX_LIMIT, Filter, Query

PointId = int | str
# All payload keys or vectors, none, or those of these names; of a payload also all but some.
Selector = bool | Sequence[str] | models.PayloadSelectorExclude

DENSE, SPARSE, MULTIVECTOR = "dense", "sparse", "multivector"  # the named vectors of our collections
NAMES = (DENSE, SPARSE, MULTIVECTOR)


class Stored(Struct):
    """A point of an answer, with what of it was asked for: `payload`, `vector` by name, and `score` where it was queried."""

    id: PointId  # a UUID as text
    payload: dict[str, Any]
    vector: Any
    score: float = 0.0

    @classmethod
    def of(cls, point: models.ScoredPoint | models.Record) -> Self:
        """qdrant-client's point as this."""
        identity = point.id if isinstance(point.id, int) else str(point.id)
        return cls(identity, point.payload or {}, point.vector or {}, getattr(point, "score", 0.0))


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
    place: str  # for errors: the server's URL, or the folder

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

    async def upsert(self, name: str, points: Sequence[models.PointStruct], schema: CollectionSchema | None = None) -> None:
        """All are stored and searchable when this returns; each replaces the point of its id whole. Points are checked before
        any is sent (`points.check_points`), so a bad one harms nothing: InvalidPoint names it. `schema`: the collection's, if
        the caller has it."""
        ...

    async def query(self, name: str, query: Query) -> list[Stored]:
        """The best points, the best first, of equal scores in any order."""
        ...

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        """The points of these ids that exist, in no particular order."""
        ...

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: Filter | None = None,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> tuple[list[Stored], PointId | None]:
        """A page in the order of ids, and where the next begins."""
        ...

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
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


class PayloadBudget:
    """A bound on the payloads of one answer in bytes of JSON, over all its pages."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    @property
    def spent(self) -> int:
        """Bytes of the payloads so far."""
        return self._max_bytes - self._left

    def spend(self, points: Iterable[Stored]) -> None:
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


def sort_points(points: Iterable[Stored]) -> list[Stored]:
    """Points by descending score; of equal scores the lowest id first, numbers before UUIDs."""
    return sorted(points, key=lambda point: (-point.score, isinstance(point.id, str), point.id))


async def best_points(store: Store, collection: str, query: Query, *, budget: PayloadBudget | None = None) -> list[Stored]:
    """The query's best points, with ties settled by id, at the end too.

    Not settled are more than `SPARES[-1]` equal scores beyond the last, and queries that reach beyond `MAX_LIMIT`.
    Raises what `Store.query` raises; PayloadsTooLarge where there is a `budget`.
    """
    found: list[Stored] | None = None
    for spare in SPARES:  # a few more points, so that the last one's equals are among them
        if query.limit + spare > MAX_LIMIT:
            break
        try:
            found = await store.query(collection, replace(query, limit=query.limit + spare))
        except StoreUnavailable:
            raise
        except StoreError:  # a server may limit `limit`; a mistake in the query itself is raised again
            break
        if len(found) < query.limit + spare or found[-1].score < found[query.limit - 1].score:
            break
    points = sort_points(await store.query(collection, query) if found is None else found)[: query.limit]
    if budget is not None:
        budget.spend(points)
    return points
