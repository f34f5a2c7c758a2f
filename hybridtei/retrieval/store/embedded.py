"""The embedded engine as a store: a local folder, owned by a process that all commands share.

The engine runs only in that process, since it holds the GIL for whole calls, panics, and is ruined by some invalid points. The
first call starts or joins the process, and again after its death. The process runs one call at a time; others wait here, at
most as many as can be answered in time. A cancelled waiting call is never executed. If the process dies during a call, the call
may or may not have had an effect and raises StoreUnavailable. Ids of points never change, so a retry is safe.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridtei.errors import StoreError
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Selector, SparseVector, Stored
from hybridtei.retrieval.store.collection import check_name, check_names, schema_from_dict, schema_to_dict
from hybridtei.retrieval.store.embedded_client import ProcessClient
from hybridtei.retrieval.store.points import batches, check_ids, check_points, is_sparse
from hybridtei.retrieval.store.query import Filter, Query

MAX_READ_INLINE = 5_000  # points; making more would block the event loop for milliseconds


class EmbeddedStore:
    """One folder, which any number of a user's processes may open."""

    kind = "embedded"

    def __init__(self, path: str, *, timeout_s: float = 30.0, client: ProcessClient | None = None) -> None:
        """`client`: an earlier client of the folder's process."""
        self._owner = client or ProcessClient(path)
        self.place = f"embedded Qdrant in {os.path.abspath(path)}"
        self._timeout_s = timeout_s

    async def _call(self, call: str, name: str, *arguments: Any) -> Any:
        check_name(name)
        return await self._owner.ask(call, name, *arguments, timeout_s=self._timeout_s)

    async def collections(self) -> list[str]:
        names: list[str] = await self._owner.ask("collections", timeout_s=self._timeout_s)
        return names

    async def describe(self, name: str) -> CollectionSchema | None:
        fields = await self._call("describe", name)
        return None if fields is None else schema_from_dict(fields)

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        await self._call("create", name, schema_to_dict(schema))

    async def drop(self, name: str) -> None:
        await self._call("drop", name)

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        await self._call("annotate", name, dict(metadata))

    async def aliases(self) -> dict[str, str]:
        aliases: dict[str, str] = await self._owner.ask("aliases", timeout_s=self._timeout_s)
        return aliases

    async def alias(self, name: str, collection: str) -> None:
        await self._call("alias", name, collection)

    async def upsert(self, name: str, points: Sequence[Stored], schema: CollectionSchema | None = None) -> None:
        schema = schema or await self.describe(name)
        if schema is None:
            raise StoreError(f"embedded Qdrant: there is no collection {name!r}")
        arrays = await asyncio.to_thread(check_points, points, schema)  # thousands of points block the event loop
        for batch in batches(arrays):
            await self._call("upsert", name, [_message(point) for point in batch])

    async def query(self, name: str, query: Query) -> list[Stored]:
        points = await self._call("query", name, query)
        if len(points) > MAX_READ_INLINE:
            return await asyncio.to_thread(lambda: [_stored(point) for point in points])
        return [_stored(point) for point in points]

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        check_ids(ids)
        records = await self._call("retrieve", name, list(ids), with_payload, with_vectors)
        return [_stored(record) for record in records]

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
        page = {
            "limit": limit,
            "offset": offset,
            "filter": scroll_filter,
            "with_payload": with_payload,
            "with_vectors": with_vectors,
        }
        records, following = await self._call("scroll", name, page)
        return [_stored(record) for record in records], following

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
        count: int = await self._call("count", name, count_filter)
        return count

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        check_ids(ids)
        await self._call("delete", name, list(ids))

    async def optimize(self, name: str) -> None:
        """Merge and index now. Other calls wait, even for minutes. The process does so by itself when idle."""
        check_name(name)
        await self._owner.ask("optimize", name, timeout_s=None)

    async def close(self) -> None:
        await self._owner.close()


def _message(point: Stored) -> list[Any]:
    """[id, vectors, payload] of a checked point."""
    return [point.id, {name: _numbers(vector) for name, vector in point.vector.items()}, point.payload]


def _numbers(vector: Any) -> Any:
    if is_sparse(vector):
        return {"indices": vector.indices, "values": vector.values}
    return np.ascontiguousarray(vector)


def _stored(message: Sequence[Any]) -> Stored:
    """The point of [id, payload, vectors], and its score if it was queried."""
    identity, payload, vectors, *score = message
    return Stored(identity, payload or {}, _vectors(vectors) if vectors else {}, *score)


def _vectors(vectors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: SparseVector(**vector) if isinstance(vector, Mapping) else vector for name, vector in vectors.items()}
