"""The embedded engine as a store: a folder here, owned by a process of its own.

Knows the store's words and the owner's calls; the engine itself is loaded only there, since it holds Python's lock for whole
calls, panics, and is ruined by a point that it should have refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from qdrant_client import models

from hybridtei.errors import StoreError
from hybridtei.store.base import CollectionSchema, PointId
from hybridtei.store.collection import check_name, check_names, plain_of, schema_from
from hybridtei.store.embedded.owner import Owner
from hybridtei.store.points import batches, checked

READ_ASIDE = 500  # points: to make models of more would hold up the event loop


class EdgeStore:
    """One folder. A second process that opens it gets a StoreError at its first call."""

    kind = "embedded"

    def __init__(self, path: str, *, timeout_s: float = 30.0) -> None:
        self._owner = Owner(path)
        self._timeout_s = timeout_s
        self._schemas: dict[str, CollectionSchema] = {}

    async def _ask(self, call: str, *arguments: Any) -> Any:
        return await self._owner.ask(call, *arguments, timeout_s=self._timeout_s)

    async def _of(self, name: str, call: str, *arguments: Any) -> Any:
        check_name(name)
        return await self._ask(call, name, *arguments)

    async def collections(self) -> list[str]:
        names: list[str] = await self._ask("collections")
        return names

    async def describe(self, name: str) -> CollectionSchema | None:
        layout = await self._of(name, "describe")
        if layout is None:
            return None
        self._schemas[name] = schema_from(layout)
        return self._schemas[name]

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        await self._of(name, "create", plain_of(schema))
        self._schemas[name] = schema

    async def drop(self, name: str) -> None:
        self._schemas.pop(name, None)
        await self._of(name, "drop")

    async def upsert(self, name: str, points: Sequence[models.PointStruct]) -> None:
        schema = self._schemas.get(name) or await self.describe(name)
        if schema is None:
            raise StoreError(f"embedded Qdrant: there is no collection {name!r}")
        ready = await asyncio.to_thread(checked, points, schema)  # thousands of points would hold up the event loop
        for batch in batches(ready):
            await self._of(name, "upsert", [_sent(point) for point in batch])

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
        found = await self._of(name, "query", _plain(request))
        if len(found) > READ_ASIDE:
            return await asyncio.to_thread(lambda: [_scored(one) for one in found])
        return [_scored(one) for one in found]

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: bool | Sequence[str] = True,
        with_vectors: bool | Sequence[str] = False,
    ) -> list[models.Record]:
        found = await self._of(name, "retrieve", list(ids), _names(with_payload), _names(with_vectors))
        return [_record(record) for record in found]

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
        page = {
            "limit": limit,
            "offset": offset,
            "filter": _plain(scroll_filter) if scroll_filter is not None else None,
            "with_payload": with_payload,
            "with_vectors": _names(with_vectors),
        }
        records, following = await self._of(name, "scroll", page)
        return [_record(record) for record in records], following

    async def count(self, name: str, count_filter: models.Filter | None = None) -> int:
        count: int = await self._of(name, "count", _plain(count_filter) if count_filter is not None else None)
        return count

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        await self._of(name, "delete", list(ids))

    async def optimize(self, name: str) -> None:
        """Merge and index now, however long it takes; other calls wait meanwhile. The owner does so by itself when idle."""
        check_name(name)
        await self._owner.ask("optimize", name, timeout_s=None)

    async def close(self) -> None:
        await self._owner.close()


def _plain(model: Any) -> Any:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False)


def _sent(point: models.PointStruct) -> list[Any]:
    """[id, vectors, payload] of a checked point."""
    assert isinstance(point.vector, Mapping)
    vectors = {name: _sent_vector(vector) for name, vector in point.vector.items()}
    return [point.id, vectors, point.payload]


def _sent_vector(vector: Any) -> Any:
    if isinstance(vector, models.SparseVector):
        return {"indices": vector.indices, "values": vector.values}
    return np.ascontiguousarray(vector)


def _record(found: Sequence[Any]) -> models.Record:
    identity, payload, vectors = found[:3]
    return models.Record.model_construct(id=identity, payload=payload, vector=_vectors(vectors))


def _scored(found: Sequence[Any]) -> models.ScoredPoint:
    identity, payload, vectors, version, score = found
    return models.ScoredPoint.model_construct(
        id=identity, payload=payload, vector=_vectors(vectors), version=version, score=score
    )


def _vectors(vectors: Mapping[str, Any] | None) -> Any:
    if vectors is None:
        return None
    return {
        name: models.SparseVector.model_construct(**vector) if isinstance(vector, Mapping) else vector
        for name, vector in vectors.items()
    }


def _names(wanted: bool | Sequence[str]) -> bool | list[str]:
    return wanted if isinstance(wanted, bool) else list(wanted)
