"""Runs `hybridtei migrate`: fills a copy of a collection with another model's vectors, and switches
the name to it.

The name that users search is an alias. If it is a collection's own name, the collection first
moves: its points are copied, with their vectors, to `NAME.0`, which answers while an alias takes
the name. The collections' metadata describe the copies:

    migration_of     of a copy, and of `NAME.0`: the collection with the same texts
    previous         of a copy that answers: the collection that answered before, for --rollback
    switching_until  of the old collection: writers wait until then, or until the name is switched
    stand_in         of a collection that moves: the collection that answers instead

Run a killed command again: it copies points that differ, and continues.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from tqdm.auto import tqdm

from hybridtei.batch import Head
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, UnknownCollection
from hybridtei.models.fingerprint import fingerprint_of_loaded, model_of
from hybridtei.retrieval.ingest.chunking import CONTEXT
from hybridtei.retrieval.ingest.pipeline import embed_in_context
from hybridtei.retrieval.migrate import MigrateOptions
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.base import NAMES, CollectionSchema, PointId, Store, Stored, pages_of
from hybridtei.retrieval.store.collection import (
    KEPT_S,
    MIGRATION_OF,
    STAND_IN,
    SWITCHING,
    CollectionSchemas,
    check_fits,
    check_name,
    heads_of,
    others,
)
from hybridtei.retrieval.store.plan import (
    FINGERPRINT,
    MODEL_ID,
    MODEL_KEYS,
    fit_to_schema,
    layout_of,
    plan_of,
    schema_for,
    signed,
    with_budget,
    without_packed,
)
from hybridtei.retrieval.store.points import to_points
from hybridtei.retrieval.store.query import CollectionPlan

Tell = Callable[[str], None]
# Records of the source -> points of the copy
Convert = Callable[[Sequence[Stored]], Awaitable[list[Stored]]]
Advance = Callable[[int], object]
PAGE_POINTS = 128
# The payload's key of the text, written by `ingest` and `/collections/{name}/points`
TEXT = "text"
# A metadata key
PREVIOUS = "previous"
# A metadata key: outputs that the collection had before it changed to a model without them
DROPPED = "dropped_outputs"
OWN_KEYS = frozenset({MIGRATION_OF, PREVIOUS, SWITCHING, STAND_IN, DROPPED})
# How long writers wait for a killed command, and how often a running one renews the time
MARK_S, RENEW_S = (60.0, 15.0)
MAX_PASSES = 50


def run_migration(
    options: MigrateOptions,
    model: ModelConfig,
    engine: EngineConfig,
    store: StoreConfig,
    *,
    tell: Tell = lambda line: None,
) -> None:
    """Take a step of a migration. Raises HybridTeiError or OSError; the same command continues
    where it stopped."""
    check_name(options.collection)

    async def run() -> None:
        async with opened(store) as opened_store:
            await MigrationRun(opened_store, options, model, engine, tell).run()

    asyncio.run(run())


class MigrationRun:
    """A step of a migration of one collection."""

    def __init__(
        self,
        store: Store,
        options: MigrateOptions,
        model: ModelConfig,
        engine: EngineConfig,
        tell: Tell,
    ) -> None:
        self._store = store
        self._options = options
        self._model = model
        self._engine = engine
        self._tell = tell
        self._name = options.collection
        self._encoders: dict[tuple[Any, ...], Encoder] = {}

    async def run(self) -> None:
        """Take the step. Raises HybridTeiError."""
        steps = {
            "migrate": self._migrate,
            "rollback": self._rollback,
            "delete_old": self._delete_old,
        }
        aliases = await self._store.aliases()
        if other := next(
            (alias for alias, collection in aliases.items() if collection == self._name), None
        ):
            raise InvalidInput(f"{self._name!r} is what {other!r} stands for: migrate {other!r}")
        source = await self._finish_killed(aliases)
        schema = await self._store.describe(source)
        if schema is None:
            named = await others(self._store, self._name)
            raise UnknownCollection(f"there is no collection `{self._name}`{named}")
        unmarked = {
            key: value for key, value in schema.metadata.items() if key not in (SWITCHING, STAND_IN)
        }
        schema = replace(schema, metadata=unmarked, stored_as=source)
        try:
            if step := steps.get(self._options.step):
                await step(schema)
            self._tell(await self._status())
        finally:
            for encoder in self._encoders.values():
                encoder.close()

    async def _finish_killed(self, aliases: dict[str, str]) -> str:
        """The collection behind the name. If a run was killed between a switch's two writes, first
        finish the switch."""
        source = aliases.get(self._name, self._name)
        if await self._store.describe(source) is None:
            copies = await self._with(MIGRATION_OF, source)
            # `_migrate` sets this key just before the switch
            ready = [copy for copy in copies if copy.metadata.get(PREVIOUS)]
            if ready and ready[0].stored_as is not None:
                await self._store.alias(self._name, ready[0].stored_as)
                return ready[0].stored_as
        return source

    async def _with(self, key: str, value: str) -> list[CollectionSchema]:
        """The schemas of collections with these metadata."""
        described = [
            (name, await self._store.describe(name)) for name in await self._store.collections()
        ]
        return [
            replace(schema, stored_as=name)
            for name, schema in described
            if schema is not None and schema.metadata.get(key) == value
        ]

    async def _status(self) -> str:
        target = (await self._store.aliases()).get(self._name, self._name)
        answering = await self._store.describe(target)
        previous = None if answering is None else answering.metadata.get(PREVIOUS)
        lines = [f"{self._name}: {await self._counted(target)} answers"]
        lines += [
            f"  {await self._counted(str(copy.stored_as))} is a copy"
            for copy in await self._with(MIGRATION_OF, target)
        ]
        if previous is not None:
            lines.append(
                f"  {await self._counted(previous)} is the previous one (--rollback, --delete-old)"
            )
        return "\n".join(lines)

    async def _counted(self, collection: str) -> str:
        schema = await self._store.describe(collection)
        if schema is None:
            return f"{collection}, which is gone,"
        return (
            f"{collection} ({await self._store.count(collection):,} points of "
            f"{schema.metadata.get(MODEL_ID)})"
        )

    async def _migrate(self, old: CollectionSchema) -> None:
        source = str(old.stored_as)
        is_plain, options = source == self._name, self._options
        if is_plain and not (options.no_switch or options.yes):
            raise InvalidInput(
                f"{source!r} is a collection, and an alias will take its name: for a moment other "
                "clients of the store may find neither. --yes accepts this; --no-switch fills "
                "the copy only"
            )
        if unknown := {*old.vectors, *old.sparse} - set(NAMES):
            raise InvalidInput(
                f"collection {source!r} has vectors that no model here makes: "
                f"{', '.join(sorted(unknown))}"
            )
        # Raises InvalidInput early if the first points have no text
        records, _ = await self._store.scroll(source, limit=10)
        for record in records:
            text_of(record)
        plan = await self._planned(old)
        if _has_vectors_of(old, plan):
            self._tell(f"{self._name} has these vectors already")
            return
        new = await self._copy_of(old, plan, 1)
        copy = str(new.stored_as)
        with tqdm(
            total=await self._store.count(source),
            unit="point",
            disable=options.quiet,
            file=sys.stderr,
        ) as bar:
            await fill(self._store, source, copy, self._embedding(new), advance=bar.update)
        await self._catch_up(source, copy, self._embedding(new))
        if options.no_switch:
            return
        moved = None
        if is_plain:
            moved = str((await self._copy_of(old, old, 0)).stored_as)
            await fill(self._store, source, moved)
        async with self._held(source, moved):
            if moved is not None:
                # Wait until no cached schema leads a search to the collection's own name
                await asyncio.sleep(KEPT_S + 1)
                await fill(self._store, source, moved)
            await fill(self._store, source, copy, self._embedding(new))
            await self._store.annotate(copy, {PREVIOUS: moved or source})
            await self._switch(copy)
        if moved is not None:
            await self._store.annotate(moved, {MIGRATION_OF: None})
        await self._store.annotate(copy, {MIGRATION_OF: None})

    async def _catch_up(self, source: str, copy: str, convert: Convert) -> None:
        """Make passes until one finds few differences. Writers wait during the last one."""
        for _ in range(MAX_PASSES):
            if await fill(self._store, source, copy, convert) <= 10:
                return

    @asynccontextmanager
    async def _held(self, source: str, stand_in: str | None = None) -> AsyncIterator[None]:
        """A context in which writers wait, and searches read `stand_in`, if given, until the name
        is switched."""

        async def mark() -> None:
            await self._store.annotate(
                source, {SWITCHING: time.time() + MARK_S, STAND_IN: stand_in}
            )

        async def renew() -> None:
            while True:
                await asyncio.sleep(RENEW_S)
                await mark()

        await mark()
        renewing = asyncio.create_task(renew())
        try:
            # Let `renew` begin
            await asyncio.sleep(0)
            yield
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
            # After a switch an alias may have the name, and the collection is gone
            is_there = (
                source not in await self._store.aliases()
                and await self._store.describe(source) is not None
            )
            if is_there:
                await self._store.annotate(source, {SWITCHING: None, STAND_IN: None})

    async def _switch(self, collection: str) -> None:
        began = time.monotonic()
        await self._store.alias(self._name, collection)
        self._tell(
            f"{self._name} is {collection} now, switched in {time.monotonic() - began:.3f} s"
        )

    async def _rollback(self, current: CollectionSchema) -> None:
        source, previous = str(current.stored_as), current.metadata.get(PREVIOUS)
        old = None if previous is None else await self._store.describe(previous)
        if previous is None or old is None:
            raise InvalidInput(
                f"collection {self._name!r}: the previous one was deleted; migrate --to the old "
                "model"
            )
        old = replace(old, stored_as=previous)
        if FINGERPRINT not in old.metadata:
            # Only its texts tell whether the model still is the one that made it
            model_id = str(old.metadata.get(MODEL_ID))
            model = self._encoder(model_id, old).named(model_id)
            await CollectionSchemas(self._store).fit(previous, old, model)
        convert = self._embedding(old)
        await self._catch_up(source, previous, convert)
        async with self._held(source):
            await fill(self._store, source, previous, convert)
            await self._store.annotate(source, {MIGRATION_OF: previous, PREVIOUS: None})
            await self._switch(previous)

    async def _delete_old(self, current: CollectionSchema) -> None:
        if (previous := current.metadata.get(PREVIOUS)) is None:
            raise InvalidInput(f"collection {self._name!r}: there is no previous collection")
        await self._store.drop(previous)
        await self._store.annotate(str(current.stored_as), {PREVIOUS: None, MIGRATION_OF: None})

    async def _copy_of(
        self, old: CollectionSchema, wanted: CollectionSchema, first: int
    ) -> CollectionSchema:
        """The copy that an earlier run made with the same vectors, or a new one. Numbers start at
        `first`."""
        for copy in await self._with(MIGRATION_OF, str(old.stored_as)):
            if _has_vectors_of(copy, wanted):
                check_fits(copy, wanted, str(copy.stored_as))
                return copy
            if not _has_vectors_of(copy, old):
                self._tell(
                    f"{copy.stored_as} is a copy by another model or plan: `hybridtei collections "
                    "delete` deletes it"
                )
        taken = await self._store.collections()
        name = next(
            name
            for name in (f"{self._name}.{first + i}" for i in range(len(taken) + 1))
            if name not in taken
        )
        schema = replace(
            wanted, metadata={**wanted.metadata, MIGRATION_OF: old.stored_as}, stored_as=name
        )
        await self._store.create(name, replace(schema, stored_as=None))
        return schema

    async def _planned(self, old: CollectionSchema) -> CollectionSchema:
        """The schema of the copy. Raises InvalidInput if the model lacks outputs that
        --drop-outputs does not name."""
        options = self._options
        model_id = options.to or old.metadata.get(MODEL_ID)
        if model_id is None:
            raise InvalidInput(
                f"collection {self._name!r} does not have its model's name: name a model with --to"
            )
        spec = self._encoder(model_id, None).spec
        had = heads_of(old) | {Head(name) for name in old.metadata.get(DROPPED, ())}
        lacking = sorted(had - spec.heads)
        agreed = set((options.drop_outputs or "").split(",")) | set(old.metadata.get(DROPPED, ()))
        if unnamed := [head for head in lacking if head not in agreed]:
            raise InvalidInput(
                f"{model_id} makes no {' and no '.join(unnamed)} vectors, which collection "
                f"{self._name!r} has: --drop-outputs {','.join(lacking)} continues without them"
            )
        before = plan_of(old)
        plan = msgspec.structs.replace(
            before,
            dense_dim=options.dense_dim,
            multivector_dim=None,
            multivector_tokens=options.multivector_tokens,
            multivector_dtype=options.multivector_dtype,
        )
        plan = with_budget(plan, before.multivector_tokens, before.multivector_dtype)
        heads = spec.heads & had
        planned = await asyncio.to_thread(schema_for, spec, model_id, plan, heads=heads)
        # Keys of the user and of the ingest stay
        metadata = {
            key: value for key, value in old.metadata.items() if key not in MODEL_KEYS | OWN_KEYS
        }
        metadata |= planned.metadata
        if lacking:
            metadata[DROPPED] = lacking
        return replace(planned, metadata=metadata)

    def _embedding(self, schema: CollectionSchema) -> Convert:
        """Make points with the same ids and payloads, and the vectors of the model that `schema`
        names."""
        heads = sorted(heads_of(schema))

        def embed(records: Sequence[Stored]) -> list[Stored]:
            encoder = self._encoder(str(schema.metadata.get(MODEL_ID)), schema)
            encode = partial(encoder.encode, outputs=heads, input_type="document")
            texts = [(str(record.payload.get(CONTEXT, "")), text_of(record)) for record in records]
            embedded = embed_in_context(encode, texts)
            payloads = [without_packed(record.payload) for record in records]
            ids: list[Any] = [record.id for record in records]
            return to_points(fit_to_schema(embedded, schema), ids, payloads)

        return lambda records: asyncio.to_thread(embed, records)

    def _encoder(self, model_id: str, schema: CollectionSchema | None) -> Encoder:
        """Load a model's encoder, with the budget of a collection's multi-vectors."""
        plan = CollectionPlan() if schema is None else plan_of(schema)
        tokens, dtype = plan.multivector_tokens, plan.multivector_dtype
        key = (model_id, tokens, dtype)
        if key not in self._encoders:
            config = msgspec.structs.replace(
                self._model, model_id=model_id, multivector_tokens=tokens, multivector_dtype=dtype
            )
            self._encoders[key] = Encoder.load(config=config, engine=self._engine)
        if schema is not None:
            spec = self._encoders[key].spec
            planned = layout_of(spec, model_id, plan, heads_of(schema), is_there=True)
            check_fits(schema, signed(planned, model_of(fingerprint_of_loaded(spec))))
        return self._encoders[key]


def _has_vectors_of(one: CollectionSchema, other: CollectionSchema) -> bool:
    """True if both collections have the same outputs of the same model, in the same format."""
    same_model = all(
        one.metadata.get(key) == other.metadata.get(key) for key in (MODEL_ID, FINGERPRINT)
    )
    return same_model and heads_of(one) == heads_of(other) and plan_of(one) == plan_of(other)


async def fill(
    store: Store,
    source: str,
    copy: str,
    convert: Convert | None = None,
    *,
    advance: Advance = lambda count: None,
) -> int:
    """Make one pass over both collections: write differing points to `copy`, and delete points from
    it that left `source`.

    `convert`: makes points of the copy; None: they keep their vectors. Returns the number of
    differing points. Points are equal if their payloads are equal. Raises StoreError and the errors
    of `convert`; the next pass continues.
    """
    changed = 0
    async for records in pages_of(store, source, PAGE_POINTS):
        payloads: dict[PointId, Any] = {}
        if records:
            stored = await store.retrieve(copy, [record.id for record in records])
            payloads = {point.id: without_packed(point.payload) for point in stored}
        stale = [
            record
            for record in records
            if payloads.get(record.id) != without_packed(record.payload)
        ]
        if stale and convert is None:
            ids = [record.id for record in stale]
            await store.upsert(copy, await store.retrieve(source, ids, with_vectors=True))
        elif stale and convert is not None:
            await store.upsert(copy, await convert(stale))
        changed += len(stale)
        advance(len(records))
    return changed + await _delete_gone(store, source, copy)


async def _delete_gone(store: Store, source: str, copy: str) -> int:
    """Delete points of the copy that the source no longer has. Return their number."""
    deleted = 0
    async for records in pages_of(store, copy, PAGE_POINTS, with_payload=False):
        gone = {record.id for record in records}
        if gone:
            for record in await store.retrieve(source, [*gone], with_payload=False):
                gone.discard(record.id)
        if gone:
            await store.delete(copy, [*gone])
            deleted += len(gone)
    return deleted


def text_of(record: Stored) -> str:
    """The stored text of a point. Raises InvalidInput without one."""
    text = record.payload.get(TEXT)
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(
            f"point {record.id} has no text in its payload (`{TEXT}`): only stored texts can be "
            "embedded anew"
        )
    return text
