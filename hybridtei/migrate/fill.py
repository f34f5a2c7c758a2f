"""One copy of a collection is made equal to another: texts are embedded anew, payloads are those of the source.

A point that differs is copied and compared again, until it is equal: a writer may have changed it meanwhile, in both. So a copy
may be interrupted anywhere, and is repeated from the start, where equal points cost two reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from qdrant_client import models

from hybridtei.errors import InvalidInput, StoreError
from hybridtei.outputs import Embeddings
from hybridtei.store.base import CollectionSchema, PointId, Store, id_of
from hybridtei.store.migration import TEXT, moved
from hybridtei.store.packed import without_packed

PAGE_POINTS = 128
MAX_ROUNDS = 50  # of a point that is changed each time, and of passes over a collection that never stands still
Embed = Callable[[Sequence[str]], Awaitable[Embeddings]]
Advance = Callable[[int], None]


class Filler:
    """Copies `source` into the collection `schema.stored_as`."""

    def __init__(self, store: Store, source: str, schema: CollectionSchema, embed: Embed, advance: Advance) -> None:
        assert schema.stored_as is not None
        self._store, self._source, self._schema, self._twin = store, source, schema, schema.stored_as
        self._embed, self._advance = embed, advance

    async def fill(self) -> None:
        """Every point is compared, copied where it differs, and deleted where the source has it no more.

        Raises InvalidInput for a point without a text, StoreError where the collection changes too fast to be followed.
        """
        await self._pages(self._source)
        await self._pages(self._twin)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Passes until both have as many points, which writers without the new model make necessary."""
        for _ in range(MAX_ROUNDS):
            if await self._store.count(self._source) == await self._store.count(self._twin):
                return
            await self._pages(self._source)
            await self._pages(self._twin)
        raise StoreError(f"{self._source}: changes faster than it can be copied: run the same command again")

    async def _pages(self, name: str) -> None:
        offset: PointId | None = None
        while True:
            records, offset = await self._store.scroll(name, limit=PAGE_POINTS, offset=offset, with_payload=False)
            await self._settle([id_of(record) for record in records])
            if name == self._source:
                self._advance(len(records))
            if offset is None:
                return

    async def _settle(self, ids: Sequence[PointId]) -> None:
        for _ in range(MAX_ROUNDS):
            if not ids:
                return
            there = {id_of(record): record for record in await self._store.retrieve(self._twin, ids)}
            here = {id_of(record): record for record in await self._store.retrieve(self._source, ids)}
            gone = [identity for identity in there if identity not in here]
            stale = [
                record for identity, record in here.items() if identity not in there or not _is_equal(record, there[identity])
            ]
            if gone:
                await self._store.delete(self._twin, gone)
            if stale:
                embedded = await self._embed([text_of(record.id, record.payload) for record in stale])
                await self._store.upsert(self._twin, moved(stale, embedded, self._schema))
            ids = [*gone, *map(id_of, stale)]
        raise StoreError(f"{self._source}: point {ids[0]} changes faster than it can be copied: run the same command again")


def _is_equal(one: models.Record, other: models.Record) -> bool:
    return without_packed(one.payload or {}) == without_packed(other.payload or {})


def text_of(identity: object, payload: object) -> str:
    """The stored text of a point. Raises InvalidInput without one."""
    text = payload.get(TEXT) if isinstance(payload, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"point {identity} has no text in its payload (`{TEXT}`): only stored texts can be embedded anew")
    return text
