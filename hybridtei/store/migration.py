"""A collection that changes its model: two copies of its points, and which of them answers.

The record is in the metadata of the collection; its twin is a collection of its own, of the other model or plan. Searches go to
the copy that answers, or to the other where only its model is at hand. Writes go to both: after a write to one copy its record
is read again, so that a copy whose filling begins later reads the point, and one that began before gets it by the writer.
A writer without a copy's model deletes the point there, and the migrating process fills it in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import Struct
from qdrant_client import models

from hybridtei.errors import CollectionMismatch
from hybridtei.outputs import Embeddings
from hybridtei.store.base import CollectionSchema, PointId, Store
from hybridtei.store.packed import without_packed
from hybridtei.store.plan import MODEL_ID
from hybridtei.store.points import fit_to_schema, to_points

RECORD, TWIN_OF = "migration", "migration_of"  # keys of metadata: the collection's, and its twin's
TEXT = "text"  # key of the payload, as `ingest` writes it

# Embeds texts for a copy; None where its model is not at hand.
EmbedFor = Callable[[CollectionSchema, Sequence[str]], Awaitable[Embeddings | None]]


class Migration(Struct, frozen=True, kw_only=True):
    """A migration of `source`. `twin` is being filled; both are whole; the twin answers; the source is about to go.

    `since`: when it began, in seconds since 1970.
    """

    state: Literal["filling", "both", "flipped", "finishing"]
    twin: str
    since: float = 0.0

    @property
    def twin_answers(self) -> bool:
        return self.state in ("flipped", "finishing")


def migration_of(schema: CollectionSchema) -> Migration | None:
    """The record of a collection that migrates."""
    record = schema.metadata.get(RECORD)
    return None if record is None else msgspec.convert(record, Migration)


def record_of(migration: Migration | None) -> dict[str, Any]:
    """The metadata that `Store.annotate` writes."""
    return {RECORD: None if migration is None else msgspec.structs.asdict(migration)}


async def copies(store: Store, name: str, *, writing: bool = False) -> list[CollectionSchema]:
    """The copies of a collection, the one that answers first; empty if there is none.

    `writing`: also one that is not whole yet.
    """
    schema = await store.describe(name)
    if schema is None:
        return []
    source, migration = replace(schema, stored_as=name), migration_of(schema)
    twin = None if migration is None else await store.describe(migration.twin)
    if migration is None or twin is None:
        return [source]
    twin = replace(twin, stored_as=migration.twin)
    match migration.state:
        case "filling":
            return [source, twin] if writing else [source]
        case "both":
            return [source, twin]
        case "flipped":
            return [twin, source]
    return [twin]


@dataclass(frozen=True, slots=True)
class Copies:
    """Writes to a collection and to its other copies. `embed_for`: makes the vectors of those."""

    store: Store
    name: str
    embed_for: EmbedFor | None = None

    async def upsert(self, written: str, points: Sequence[models.PointStruct]) -> None:
        """Stores points in the copy that is `written`, and the same texts in the others.

        Raises CollectionMismatch where another copy answers by now, and its model is not at hand.
        """
        await self.store.upsert(written, points)
        for schema, answers in await self._others(written):
            assert schema.stored_as is not None
            texts = [(point.payload or {}).get(TEXT) for point in points]
            embedded = None if self.embed_for is None else await self.embed_for(schema, [str(text) for text in texts])
            if embedded is not None and all(isinstance(text, str) for text in texts):
                await self.store.upsert(schema.stored_as, moved(points, embedded, schema))
            elif answers:
                raise CollectionMismatch(
                    f"collection {self.name!r} has changed its model to {schema.metadata.get(MODEL_ID)}: write with that model"
                )
            else:
                await self.store.delete(schema.stored_as, [point.id for point in points])  # type: ignore[misc]

    async def delete(self, written: str, ids: Sequence[PointId]) -> None:
        """Deletes points of all copies."""
        await self.store.delete(written, ids)
        for schema, _ in await self._others(written):
            assert schema.stored_as is not None
            await self.store.delete(schema.stored_as, ids)

    async def _others(self, written: str) -> list[tuple[CollectionSchema, bool]]:
        there = await copies(self.store, self.name, writing=True)
        return [(schema, place == 0) for place, schema in enumerate(there) if schema.stored_as != written]


def moved(
    points: Sequence[models.PointStruct | models.Record], embedded: Embeddings, schema: CollectionSchema
) -> list[models.PointStruct]:
    """The same ids and payloads with the vectors of a copy's model."""
    payloads = [without_packed(point.payload or {}) for point in points]
    ids: list[Any] = [point.id for point in points]
    return to_points(fit_to_schema(embedded, schema), ids, payloads)
