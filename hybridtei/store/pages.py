"""A page of a store's answer, the same each time it is asked for: points of equal scores stand in the order of their ids.

Knows scores and ids. Qdrant gives points of equal scores in any order, and any of those that straddle the end of a page; in
rank fusion such ties are common. So a few more are asked for than the page holds, and more again where that does not settle it.
A later page is asked for from the top, ids only, or a point could stand on two pages or on none.

Payloads and vectors come for a hundred points at a time, and are weighed as they come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from qdrant_client import models

from hybridtei.errors import PayloadsTooLarge, StoreError, StoreUnavailable
from hybridtei.store import MAX_LIMIT
from hybridtei.store.base import PointId, Store

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


def identity_of(point: models.ScoredPoint | models.Record) -> PointId:
    """Its id; a UUID as text."""
    return point.id if isinstance(point.id, int) else str(point.id)


def in_order(points: Iterable[models.ScoredPoint]) -> list[models.ScoredPoint]:
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
            return in_order(await store.query(collection, as_asked)), is_large
        try:
            points = in_order(await store.query(collection, asked))
        except StoreUnavailable:
            raise
        except StoreError:  # it may limit how many one asks for; and what is wrong with the request itself is told again
            return in_order(await store.query(collection, as_asked)), is_large
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
        ids = [identity_of(point) for point in points]
        records = await store.retrieve(collection, ids, with_payload=with_payload, with_vectors=with_vectors)
        if budget is not None:
            budget.spend(records)
        found = {identity_of(record): record for record in records}
        filled += [
            point.model_copy(update={"payload": record.payload, "vector": record.vector})
            for point in points
            if (record := found.get(identity_of(point))) is not None
        ]
    return filled


def _place(point: models.ScoredPoint) -> tuple[float, bool, Any]:
    identity = identity_of(point)
    return -point.score, isinstance(identity, str), identity
