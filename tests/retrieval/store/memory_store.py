"""A store in this process's memory, for tests and notebooks: qdrant-client's local mode, exact and slow.

The surprise: local mode is safe neither for threads nor for an event loop, which it blocks for a whole call; so one call runs
at a time, in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from qdrant_client import QdrantClient, models

from hybridtei.errors import StoreError
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Selector, Stored
from hybridtei.retrieval.store.collection import check_names, create_arguments, schema_of
from hybridtei.retrieval.store.points import as_lists, check_ids, check_points
from hybridtei.retrieval.store.query import Filter, Query
from hybridtei.retrieval.store.server import query_arguments, selector, served_filter, stored_of

T = TypeVar("T")


class MemoryStore:
    """Every instance is a database of its own."""

    kind, place = "memory", "memory"

    def __init__(self) -> None:
        self._client = QdrantClient(":memory:")
        self._lock = threading.Lock()

    async def _run(self, call: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        def alone() -> T:
            with self._lock:
                try:
                    return call(*arguments, **settings)
                except (ValueError, RuntimeError, NotImplementedError, AssertionError, IndexError, KeyError) as error:
                    raise StoreError(f"Qdrant in memory: {error}") from error

        return await asyncio.to_thread(alone)

    async def collections(self) -> list[str]:
        found = await self._run(self._client.get_collections)
        return sorted(collection.name for collection in found.collections)

    async def describe(self, name: str) -> CollectionSchema | None:
        return await self._run(self._describe, name)

    def _describe(self, name: str) -> CollectionSchema | None:
        return schema_of(self._client.get_collection(name)) if self._client.collection_exists(name) else None

    async def create(self, name: str, plan: CollectionSchema) -> None:
        check_names(name, plan)
        await self._run(self._client.create_collection, name, **create_arguments(plan))

    async def drop(self, name: str) -> None:
        await self._run(self._client.delete_collection, name)

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        await self._run(self._client.update_collection, name, metadata=dict(metadata))

    async def aliases(self) -> dict[str, str]:
        found = await self._run(self._client.get_aliases)
        return {alias.alias_name: alias.collection_name for alias in found.aliases}

    async def alias(self, name: str, collection: str) -> None:
        if name in await self.collections():
            await self.drop(name)
        create = models.CreateAliasOperation(create_alias=models.CreateAlias(alias_name=name, collection_name=collection))
        await self._run(self._client.update_collection_aliases, [create])

    async def upsert(self, name: str, points: Sequence[Stored], schema: CollectionSchema | None = None) -> None:
        def call() -> None:
            plan = schema or self._describe(name)
            if plan is None:
                raise StoreError(f"there is no collection {name!r}")
            ready = [as_lists(point) for point in check_points(points, plan)]
            if ready:
                self._client.upsert(name, ready, wait=True)

        await self._run(call)

    async def query(self, name: str, query: Query) -> list[Stored]:
        # all search is exact here; the client would warn that parameters change nothing
        arguments = query_arguments(query) | {"search_params": None}
        return [stored_of(point) for point in (await self._run(self._client.query_points, name, **arguments)).points]

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        check_ids(ids)
        given = {"with_payload": selector(with_payload), "with_vectors": selector(with_vectors)}
        return [stored_of(point) for point in await self._run(self._client.retrieve, name, list(ids), **given)]

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
        given = {"with_payload": selector(with_payload), "with_vectors": selector(with_vectors)}
        page = await self._run(self._client.scroll, name, served_filter(scroll_filter), limit, offset=offset, **given)
        return [stored_of(point) for point in page[0]], page[1]

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
        return (await self._run(self._client.count, name, count_filter=served_filter(count_filter), exact=True)).count

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        check_ids(ids)
        await self._run(self._client.delete, name, models.PointIdsList(points=list(ids)), wait=True)

    async def optimize(self, name: str) -> None:
        """Nothing to build: every search looks at every point."""

    async def close(self) -> None:
        await self._run(self._client.close)
