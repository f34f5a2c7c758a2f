"""Makes one collection equal to another, page by page. After an interruption it continues where points differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence


from hybridtei.errors import InvalidInput
from hybridtei.retrieval.store.base import PointId, Store, Stored
from hybridtei.retrieval.store.plan import without_packed

PAGE_POINTS = 128
TEXT = "text"  # the payload's key of the text, written by `ingest` and `/collections/{name}/points`
# Records of the source -> points of the copy.
Convert = Callable[[Sequence[Stored]], Awaitable[list[Stored]]]


async def fill(
    store: Store, source: str, copy: str, convert: Convert, *, advance: Callable[[int], object] = lambda count: None
) -> int:
    """Make one pass over both collections: write differing points to `copy`, and delete points from it that left `source`.

    Returns the number of differing points. Points are equal if their payloads are equal. Raises StoreError and the errors of
    `convert`; the next pass continues.
    """
    changed, offset = 0, None
    while True:
        records, offset = await store.scroll(source, limit=PAGE_POINTS, offset=offset)
        there = {one.id: one for one in await store.retrieve(copy, [one.id for one in records])} if records else {}
        stale = [one for one in records if one.id not in there or not _is_equal(one, there[one.id])]
        if stale:
            await store.upsert(copy, await convert(stale))
        changed += len(stale)
        advance(len(records))
        if offset is None:
            return changed + await _delete_gone(store, source, copy)


async def _delete_gone(store: Store, source: str, copy: str) -> int:
    deleted = 0
    offset: PointId | None = None
    while True:
        records, offset = await store.scroll(copy, limit=PAGE_POINTS, offset=offset, with_payload=False)
        ids = [one.id for one in records]
        here = {one.id for one in await store.retrieve(source, ids, with_payload=False)} if ids else set()
        if gone := [identity for identity in ids if identity not in here]:
            await store.delete(copy, gone)
            deleted += len(gone)
        if offset is None:
            return deleted


def with_vectors_of(store: Store, source: str) -> Convert:
    """Make points with the vectors of `source`."""

    async def convert(records: Sequence[Stored]) -> list[Stored]:
        return await store.retrieve(source, [one.id for one in records], with_vectors=True)

    return convert


def _is_equal(one: Stored, other: Stored) -> bool:
    return without_packed(one.payload) == without_packed(other.payload)


def text_of(record: Stored) -> str:
    """The stored text of a point. Raises InvalidInput without one."""
    text = record.payload.get(TEXT)
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"point {record.id} has no text in its payload (`{TEXT}`): only stored texts can be embedded anew")
    return text
