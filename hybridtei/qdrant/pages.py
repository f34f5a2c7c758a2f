"""A page of a store's answer, the same each time it is asked for: points of equal scores stand in the order of their ids.

Knows scores and ids. Qdrant gives points of equal scores in any order, and any of those that straddle the end of a page; in
rank fusion such ties are common. So a few more are asked for than the page holds, and more again where that does not settle it.
The surprise: a later page is asked for from the top, ids only, or a point could stand on two pages or on none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qdrant_client import models

from hybridtei.errors import StoreError, StoreUnavailable
from hybridtei.qdrant.query import MAX_LIMIT
from hybridtei.qdrant.store import PointId, Store

SPARES = (4, 100, 1_000)  # so many more than wanted are asked for, one after the other while ties need it
LEAN: dict[str, Any] = {"with_payload": False, "with_vector": False}


def identity_of(point: models.ScoredPoint | models.Record) -> PointId:
    """Its id; a UUID as text."""
    return point.id if isinstance(point.id, int) else str(point.id)


def in_order(points: Iterable[models.ScoredPoint]) -> list[models.ScoredPoint]:
    """The best first; of equal scores the lowest id first, numbers before UUIDs."""
    return sorted(points, key=_place)


async def page_of(store: Store, collection: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
    """What the request asks for, with ties settled by id, at both ends of the page too.

    Not settled are: more than `SPARES[-1]` equal scores beyond the page, which points of equal scores one leg of a fusion takes
    for its last candidates and how it ranks them, which the store decides, and pages that reach beyond `MAX_LIMIT`.
    Raises what `Store.query` raises.
    """
    offset, limit = request.offset or 0, request.limit or 10
    wanted = offset + limit
    for spare in SPARES:
        is_lean = offset > 0 or spare > SPARES[0]
        asked = request.model_copy(update={"limit": wanted + spare, "offset": None, **(LEAN if is_lean else {})})
        if wanted + spare > MAX_LIMIT:
            return in_order(await store.query(collection, request))
        try:
            points = in_order(await store.query(collection, asked))
        except StoreUnavailable:
            raise
        except StoreError:  # it may limit how many one asks for; and what is wrong with the request itself is told again
            return in_order(await store.query(collection, request))
        if len(points) < wanted + spare or points[-1].score < points[wanted - 1].score:
            break
    page = points[offset:wanted]
    return await _filled(store, collection, page, request) if is_lean else page


async def _filled(
    store: Store, collection: str, page: list[models.ScoredPoint], request: models.QueryRequest
) -> list[models.ScoredPoint]:
    """With the payloads and vectors that were asked for; without those that have gone meanwhile."""
    with_payload, with_vectors = bool(request.with_payload), request.with_vector or False
    if not page or not (with_payload or with_vectors):
        return page
    assert isinstance(with_vectors, bool | list)
    ids = [identity_of(point) for point in page]
    records = await store.retrieve(collection, ids, with_payload=with_payload, with_vectors=with_vectors)
    found = {identity_of(record): record for record in records}
    return [
        point.model_copy(update={"payload": record.payload, "vector": record.vector})
        for point in page
        if (record := found.get(identity_of(point))) is not None
    ]


def _place(point: models.ScoredPoint) -> tuple[float, bool, Any]:
    identity = identity_of(point)
    return -point.score, isinstance(identity, str), identity
