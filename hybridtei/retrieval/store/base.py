"""The protocol of vector stores; and points in a stable order.

Only `store.server` uses qdrant-client's models: importing them takes half a second, and making them
took half of a search's time. A store raises only `StoreError` and its subclasses, and InvalidInput
for a collection's name that no store accepts.

Points with equal scores are in the order of their ids. Qdrant returns them in any order, and any of
them at the end of a page. So a few more points are queried, and still more if these also have equal
scores.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import UUID

import orjson
from msgspec import Struct
from msgspec.structs import replace

from hybridtei.errors import InvalidPoint, PayloadsTooLarge, StoreError, StoreUnavailable
from hybridtei.retrieval.store.query import MAX_LIMIT, Filter, Query

PointId = int | str
# All payload keys or vectors, none, or only these names; for a payload also {"exclude": names}.
Selector = bool | Sequence[str] | Mapping[str, Sequence[str]]

# The names of vectors in our collections
DENSE, SPARSE, MULTIVECTOR = ("dense", "sparse", "multivector")
NAMES = (DENSE, SPARSE, MULTIVECTOR)
# A file in the folder of each collection of the embedded engine, for its process and its clients
LAYOUT = "layout.json"


class Stored(Struct, array_like=True):
    """A point to store, or a point of an answer with the requested parts, and `score` if it was
    queried.

    `vector`: by name, numbers[d], numbers[n, d], or a map of `indices` and `values`. Numbers are an
    array or lists.
    """

    # A UUID as text
    id: PointId
    payload: dict[str, Any]
    vector: dict[str, Any]
    score: float = 0.0


class VectorParams(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Qdrant's settings of a dense vector, or of a multi-vector if it has a
    `multivector_config`."""

    size: int
    distance: Literal["Cosine", "Dot", "Euclid", "Manhattan"]
    multivector_config: dict[str, Any] | None = None
    hnsw_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    on_disk: bool | None = None
    memory: str | None = None
    datatype: str | None = None


class SparseVectorParams(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Qdrant's settings of a sparse vector."""

    modifier: Literal["none", "idf"] | None = None
    index: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CollectionSchema:
    """A collection's named vectors, and the model that made them.

    `metadata`: the model's id and its tokenizer's hash, which must equal those of the model that
    embeds a query.
    """

    vectors: Mapping[str, VectorParams]
    sparse: Mapping[str, SparseVectorParams]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shard_number: int | None = None
    replication_factor: int | None = None
    on_disk_payload: bool | None = None
    # The collection's own name, if it was found by an alias
    stored_as: str | None = None
    # The user's payload indexes, {key: kind}; a ! behind the kind: of tenants
    indexes: Mapping[str, str] | None = None


class Store(Protocol):
    """Collections of points. Every call may raise StoreUnavailable (retry later) or StoreError. A
    call that a store has no need of does nothing."""

    # "server", "embedded" or "memory"
    kind: str
    # For errors: the server's URL, or the folder
    place: str

    async def collections(self) -> list[str]:
        """Return the names of all collections, sorted."""

    async def describe(self, name: str) -> CollectionSchema | None:
        """Return a collection's schema, or None."""

    async def create(self, name: str, schema: CollectionSchema) -> None:
        """Create an empty collection."""

    async def drop(self, name: str) -> None:
        """Delete a collection and its points. No error if it does not exist."""

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Replace these keys of a collection's metadata, all at once. None removes a key."""

    async def aliases(self) -> dict[str, str]:
        """Return the aliases of collections: {alias: collection}."""

    async def alias(self, name: str, collection: str) -> None:
        """Make `name` an alias of a collection. Deletes a collection called `name`. Repeatable."""

    async def upsert(
        self, name: str, points: Sequence[Stored], schema: CollectionSchema | None = None
    ) -> None:
        """Store points, searchable on return. Each replaces the whole point of its id. Points are
        checked before any is sent (`points.check_points`): InvalidPoint names a bad one, and
        nothing is stored. `schema`: the collection's, if the caller has it."""

    async def query(self, name: str, query: Query) -> list[Stored]:
        """Return the best points, the best first. Equal scores are in any order."""

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        """Return the existing points with these ids, in any order."""

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
        """Return a page in the order of ids, and the start of the next one."""

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
        """Return the exact number of matching points."""

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        """Delete points. No error for ids that do not exist."""

    async def index(self, name: str, indexes: Mapping[str, str]) -> None:
        """Make payload indexes of an existing collection, {key: kind}, and those of `INDEXES` that
        the store needs."""
        return

    async def set_payload(
        self, name: str, ids: Sequence[PointId], values: Mapping[str, Any]
    ) -> None:
        """Set keys of the payloads of existing points. None removes a key."""

    async def optimize(self, name: str) -> None:
        """Build indexes, if the store does not do so by itself."""
        return

    async def close(self) -> None:
        """Flush everything to disk. No call is allowed afterwards."""
        return


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with changes. None removes a key."""
    return {key: value for key, value in {**fields, **changes}.items() if value is not None}


def check_ids(ids: Sequence[Any]) -> None:
    """Raises InvalidPoint unless every id is an integer, a text or a UUID."""
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int | str | UUID):
            raise InvalidPoint(
                f"point {value!r}: `id` is {type(value).__name__}, should be an integer or a UUID"
            )


def identity(path: Path) -> tuple[int, ...] | None:
    """What changes if a file is deleted, replaced or restored from a copy. None without the
    file."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


# Points queried beyond the page, step by step while ties need more
SPARES = (4, 100, 1_000)


class PayloadBudget:
    """A bound on the payloads of one answer in bytes of JSON, over all its pages."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    @property
    def spent(self) -> int:
        """The bytes of the payloads so far."""
        return self._max_bytes - self._left

    def spend(self, points: Iterable[Any]) -> None:
        """Count the payloads of these points. Raises PayloadsTooLarge if their payloads exceed the
        remaining bytes."""
        for point in points:
            if point.payload:
                self._left -= len(orjson.dumps(point.payload, default=str))
        if self._left < 0:
            raise PayloadsTooLarge(
                f"the payloads of the points take more than {self._max_bytes} bytes "
                "(max-search-bytes): ask for fewer points (`limit`, `rerank_limit`), or for some "
                "keys of each (`with_payload`)"
            )


async def pages_of(
    store: Store, name: str, limit: int, *, offset: PointId | None = None, **parts: Any
) -> AsyncIterator[list[Stored]]:
    """Yield all points from `offset` on, in the order of ids, one page at least. `parts`: keywords
    of `Store.scroll`."""
    while True:
        page, offset = await store.scroll(name, limit=limit, offset=offset, **parts)
        yield page
        if offset is None:
            return


def sort_points(points: Iterable[Any]) -> list[Any]:
    """Sort points, or candidates, by descending score. Equal scores have the lowest id first,
    numbers before UUIDs."""
    return sorted(points, key=lambda point: (-point.score, isinstance(point.id, str), point.id))


async def best_points(
    store: Store, collection: str, query: Query, *, budget: PayloadBudget | None = None
) -> list[Stored]:
    """The query's best points, with ties in the order of ids, also at the end.

    Exceptions: more than `SPARES[-1]` equal scores after the last point, and queries beyond
    `MAX_LIMIT`. Raises the errors of `Store.query`, and PayloadsTooLarge with a `budget`.
    """
    best: list[Stored] | None = None
    # A few more points, to include the last one's equals
    for spare in SPARES:
        if query.limit + spare > MAX_LIMIT:
            break
        try:
            best = await store.query(collection, replace(query, limit=query.limit + spare))
        except StoreUnavailable:
            raise
        except StoreError:
            # A server may bound `limit`; an error in the query itself is raised again
            break
        if len(best) < query.limit + spare or best[-1].score < best[query.limit - 1].score:
            break
    if best is None:
        best = await store.query(collection, query)
    points = sort_points(best)[: query.limit]
    if budget is not None:
        budget.spend(points)
    return points
