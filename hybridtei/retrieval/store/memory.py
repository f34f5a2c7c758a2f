"""A store in the memory of this process: exact search by numpy and scipy, for `Index`.

The arrays of a collection are made at its first query after a change. Scores and order are those of
Qdrant's exact search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec.structs import replace as changed
from numpy.typing import NDArray

from hybridtei.batch import offsets_of
from hybridtei.errors import StoreError
from hybridtei.outputs import Floats, SparseVectors, unit
from hybridtei.retrieval.store.base import (
    CollectionSchema,
    PointId,
    Selector,
    Store,
    Stored,
    check_ids,
    merged,
)
from hybridtei.retrieval.store.collection import check_names
from hybridtei.retrieval.store.conditions import matches
from hybridtei.retrieval.store.points import check_points
from hybridtei.retrieval.store.query import Filter, Query

Rows = NDArray[np.intp] | slice
# (a query's vector, n of the points) -> float32[n] scores, and bool[n]: those that can be hits
Scorer = Callable[[Any, Rows], tuple[Floats, NDArray[np.bool_]]]


@dataclass
class _Collection:
    schema: CollectionSchema
    points: dict[PointId, Stored] = field(default_factory=dict)
    # Of each vector: the ids of the points that have it, the row of each id, and their scores
    scorers: dict[str, tuple[list[PointId], dict[PointId, int], Scorer]] = field(
        default_factory=dict
    )

    def scorer(self, name: str) -> tuple[list[PointId], dict[PointId, int], Scorer]:
        """The points that have a vector, their rows, and the function that scores them."""
        if name not in self.scorers:
            ids = [identity for identity, point in self.points.items() if name in point.vector]
            vectors = [self.points[identity].vector[name] for identity in ids]
            if name in self.schema.sparse:
                scorer = _sparse_scorer(vectors, is_idf=self.schema.sparse[name].modifier == "idf")
            elif self.schema.vectors[name].multivector_config is not None:
                scorer = _multivector_scorer(vectors, self.schema.vectors[name].size)
            else:
                scorer = _dense_scorer(vectors, self.schema.vectors[name].size)
            rows_of = {identity: row for row, identity in enumerate(ids)}
            self.scorers[name] = ids, rows_of, scorer
        return self.scorers[name]


class MemoryStore(Store):
    """Collections in memory. See `Store`. Vectors are compared by cosine."""

    kind = "memory"
    place = "the memory of this process"

    def __init__(self) -> None:
        self._collections: dict[str, _Collection] = {}
        self._aliases: dict[str, str] = {}

    async def collections(self) -> list[str]:
        return sorted(self._collections)

    async def describe(self, name: str) -> CollectionSchema | None:
        collection = self._collections.get(self._aliases.get(name, name))
        return None if collection is None else collection.schema

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        if name in self._collections:
            raise StoreError(f"there is a collection {name!r} already")
        others = {params.distance for params in schema.vectors.values()} - {"Cosine"}
        if others:
            raise StoreError(f"{self.place}: compares vectors by Cosine, not by {others.pop()}")
        self._collections[name] = _Collection(schema)

    async def drop(self, name: str) -> None:
        self._collections.pop(name, None)

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        collection = self._of(name)
        schema = collection.schema
        collection.schema = replace(schema, metadata=merged(schema.metadata, metadata))

    async def aliases(self) -> dict[str, str]:
        return dict(self._aliases)

    async def alias(self, name: str, collection: str) -> None:
        self._of(collection)
        self._collections.pop(name, None)
        self._aliases[name] = collection

    async def upsert(
        self, name: str, points: Sequence[Stored], schema: CollectionSchema | None = None
    ) -> None:
        collection = self._of(name)
        checked = check_points(points, collection.schema)
        collection.points.update((point.id, point) for point in checked)
        collection.scorers.clear()

    async def query(self, name: str, query: Query) -> list[Stored]:
        collection = self._of(name)
        using = query.using
        if using not in collection.schema.vectors and using not in collection.schema.sparse:
            raise StoreError(f"collection {name!r} has no vector {using!r}")
        ids, rows_of, score = collection.scorer(using)
        if not ids:
            return []
        rows: Rows = slice(None)
        # A search scores its candidates by their ids: scoring every point took twice as long
        if query.filter is not None and (named := _named(query.filter)) is not None:
            ids = [identity for identity in dict.fromkeys(named) if identity in rows_of]
            rows = np.array(
                [rows_of[identity] for identity in ids],
                np.intp,
            )
        try:
            scores, can_be_hit = score(query.vector, rows)
        except ValueError as error:
            raise StoreError(f"collection {name!r}, vector {using!r}: {error}") from error
        if query.filter is not None:
            points = collection.points
            meets = [matches(query.filter, points[identity]) for identity in ids]
            can_be_hit = can_be_hit & np.array(meets, bool)
        best = np.flatnonzero(can_be_hit)
        if len(best) > query.limit:
            # Only the best are sorted
            best = best[np.argpartition(-scores[best], query.limit - 1)[: query.limit]]
        best = best[np.argsort(-scores[best], kind="stable")]
        keys = list(query.with_payload)
        return [
            changed(
                _chosen(collection.points[ids[place]], keys),
                score=float(scores[place]),
            )
            for place in best
        ]

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        check_ids(ids)
        points = self._of(name).points
        return [
            _chosen(points[identity], with_payload, with_vectors)
            for identity in ids
            if identity in points
        ]

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
        points = self._of(name).points
        order = sorted(points, key=_place)
        if offset is not None:
            order = [identity for identity in order if _place(identity) >= _place(offset)]
        page = [
            points[identity]
            for identity in order
            if scroll_filter is None or matches(scroll_filter, points[identity])
        ]
        following = page[limit].id if len(page) > limit else None
        return [_chosen(point, with_payload, with_vectors) for point in page[:limit]], following

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
        points = self._of(name).points
        if count_filter is None:
            return len(points)
        return sum(matches(count_filter, point) for point in points.values())

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        check_ids(ids)
        collection = self._of(name)
        for identity in ids:
            collection.points.pop(identity, None)
        collection.scorers.clear()

    async def set_payload(
        self, name: str, ids: Sequence[PointId], values: Mapping[str, Any]
    ) -> None:
        points = self._of(name).points
        for identity in ids:
            payload = merged(points[identity].payload, values)
            points[identity] = changed(points[identity], payload=payload)

    def _of(self, name: str) -> _Collection:
        collection = self._collections.get(self._aliases.get(name, name))
        if collection is None:
            raise StoreError(f"there is no collection {name!r} in {self.place}")
        return collection


def _named(condition: Filter) -> list[int | str] | None:
    """The only ids of points that can meet the filter; None if the filter names no ids."""
    if isinstance(condition.must, list):
        for part in condition.must:
            if part.has_id is not None:
                return part.has_id
    return None


def _place(identity: PointId) -> tuple[bool, PointId]:
    """Numbers before UUIDs."""
    return isinstance(identity, str), identity


def _chosen(point: Stored, payload: Selector, vectors: Selector = False) -> Stored:
    return Stored(point.id, _part(point.payload, payload), _part(point.vector, vectors))


def _part(fields: dict[str, Any], selector: Selector) -> dict[str, Any]:
    """The selected fields of a payload, or the selected vectors."""
    if isinstance(selector, bool):
        return dict(fields) if selector else {}
    if isinstance(selector, Mapping):
        return {key: value for key, value in fields.items() if key not in selector["exclude"]}
    return {key: fields[key] for key in selector if key in fields}


def _dense_scorer(vectors: Sequence[Floats], width: int) -> Scorer:
    matrix = unit(np.array(vectors, np.float32).reshape(-1, width))

    def score(vector: Any, rows: Rows) -> tuple[Floats, NDArray[np.bool_]]:
        query = unit(np.asarray(vector, np.float32).reshape(1, -1))[0]
        scores = matrix[rows] @ query
        return scores, np.ones(len(scores), bool)

    return score


def _multivector_scorer(vectors: Sequence[Floats], width: int) -> Scorer:
    """Sums, over a query's rows, of the largest product with a row of the document."""
    matrix = unit(np.concatenate([np.empty((0, width), np.float32), *vectors]))
    begins = offsets_of([len(vector) for vector in vectors])[:-1]

    def score(vector: Any, rows: Rows) -> tuple[Floats, NDArray[np.bool_]]:
        products = matrix @ unit(np.asarray(vector, np.float32)).T
        scores = np.maximum.reduceat(products, begins, axis=0).sum(axis=1)[rows]
        return scores, np.ones(len(scores), bool)

    return score


def _sparse_scorer(vectors: Sequence[Mapping[str, Any]], *, is_idf: bool) -> Scorer:
    """Dot products, over the documents that share an index with the query. `is_idf`: indices weigh
    ln(1 + (n - df + 0.5) / (df + 0.5)) times their value."""
    count = len(vectors)
    # Without vectors, there is still an array to concatenate
    nothing: dict[str, Any] = {"indices": np.empty(0, np.int64), "values": np.empty(0, np.float32)}
    parts = [nothing, *vectors]
    indices = np.concatenate([part["indices"] for part in parts])
    values = np.concatenate([part["values"] for part in parts])
    width = int(indices.max(initial=-1)) + 1
    offsets = offsets_of([len(vector["indices"]) for vector in vectors])
    columns = SparseVectors(indices.astype(np.int64), values, offsets, width).to_scipy().tocsc()

    def score(vector: Any, rows: Rows) -> tuple[Floats, NDArray[np.bool_]]:
        scores, shared = np.zeros(count), np.zeros(count, bool)
        for index, weight in zip(vector["indices"], vector["values"], strict=True):
            if index >= width:
                continue
            column = slice(columns.indptr[index], columns.indptr[index + 1])
            documents = columns.indices[column]
            rarity = 1.0
            if is_idf:
                frequency = len(documents)
                rarity = np.log1p((count - frequency + 0.5) / (frequency + 0.5))
            scores[documents] += rarity * weight * columns.data[column]
            shared[documents] = True
        return scores[rows].astype(np.float32), shared[rows]

    return score
