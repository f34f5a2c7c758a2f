"""What is asked of a vector store, in qdrant-client's own types, whichever store it is.

The types are `qdrant_client.models`: users know them, the server speaks them, and the embedded engine's are made of them in its
process. A store raises only `StoreError` and its kinds, and InvalidInput for a collection's name that no
store would take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qdrant_client import models

PointId = int | str

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
        with_payload: bool | Sequence[str] = True,
        with_vectors: bool | Sequence[str] = False,
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
        with_vectors: bool | Sequence[str] = False,
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
