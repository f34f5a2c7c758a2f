"""One call of `hybridtei migrate`: finds where a migration stands in the collection's metadata, and goes on from there."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tqdm.auto import tqdm

from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import CollectionMismatch, HybridTeiError, InvalidInput, StoreError, UnknownCollection
from hybridtei.evaluate.measures import Judgements, Way, evaluate, paired_bootstrap, read_judgements
from hybridtei.migrate import MigrateOptions
from hybridtei.migrate.fill import Embed, Filler, text_of
from hybridtei.outputs import Embeddings
from hybridtei.search.local import query_model
from hybridtei.search.options import SearchOptions
from hybridtei.search.searcher import Searcher
from hybridtei.store import open_store, with_default
from hybridtei.store.base import NAMES, CollectionSchema, Store
from hybridtei.store.collection import KEPT_S, CollectionSchemas, check_fits, check_name, heads_of
from hybridtei.store.migration import RECORD, TWIN_OF, Migration, migration_of, record_of
from hybridtei.store.plan import MODEL_ID, MODEL_KEYS, plan_of, planned_schema, settled, signed, with_budget
from hybridtei.system.machine import require_extra

Tell = Callable[[str], None]
TOP = 10
QUERY_CHARACTERS = 200


def run_migration(
    options: MigrateOptions, model: ModelConfig, engine: EngineConfig, store: StoreConfig, *, tell: Tell = lambda line: None
) -> None:
    """Take a step of a migration. Raises HybridTeiError or OSError; the same command goes on from where it stopped."""
    check_name(options.collection)
    opened = open_store(with_default(store))
    assert opened is not None
    asyncio.run(_closing(opened, MigrationRun(opened, options, model, engine, tell).run()))


async def _closing(store: Store, work: Awaitable[None]) -> None:
    try:
        await work
    finally:
        await store.close()


class MigrationRun:
    """A migration of one collection, whose record says how far it is."""

    def __init__(self, store: Store, options: MigrateOptions, model: ModelConfig, engine: EngineConfig, tell: Tell) -> None:
        self._store, self._options, self._model, self._engine, self._tell = store, options, model, engine, tell
        self._encoders: dict[tuple[Any, ...], Encoder] = {}

    async def run(self) -> None:
        """Take the step. Raises HybridTeiError."""
        name = (await self._store.aliases()).get(self._options.collection, self._options.collection)
        schema = await self._store.describe(name)
        if schema is None:
            await self._finish_dropped(name)
            return
        migration, step = migration_of(schema), self._options.step
        try:
            if step == "status":
                self._tell(await self._described(name, migration))
            elif step == "migrate":
                await self._migrate(name, schema, migration)
            elif migration is None and step == "finish" and TWIN_OF in schema.metadata:
                await self._finish_replaced(name, schema)
            elif migration is None:
                raise InvalidInput(f"collection {name!r} is not being migrated")
            elif step == "flip":
                await self._flip(name, schema, migration)
            elif step == "rollback":
                await self._rollback(name, schema, migration)
            elif step == "finish":
                await self._finish(name, migration)
            else:
                await self._cancel(name, migration)
        finally:
            for encoder in self._encoders.values():
                encoder.close()

    async def _described(self, name: str, migration: Migration | None) -> str:
        points = await self._store.count(name)
        if migration is None:
            return f"{name}: {points:,} points; no migration"
        filled = await self._store.count(migration.twin)
        answers = migration.twin if migration.twin_answers else name
        return f"{name}: {migration.state}; {points:,} points, {filled:,} in {migration.twin}; {answers} answers"

    async def _migrate(self, name: str, schema: CollectionSchema, migration: Migration | None) -> None:
        if migration is not None and migration.twin_answers:
            raise InvalidInput(f"{await self._described(name, migration)}: --finish or --rollback comes next")
        judged = self._judgements()
        strange = {*schema.vectors, *schema.sparse} - set(NAMES)
        if strange:
            raise InvalidInput(f"collection {name!r} has vectors that no model here makes: {', '.join(sorted(strange))}")
        first, _ = await self._store.scroll(name, limit=10)
        for record in first:
            text_of(record.id, record.payload)
        if migration is None:
            migration = await self._begun(name, schema)
        twin = await self._twin(migration)
        if self._options.to not in (None, twin.metadata.get(MODEL_ID)):
            raise InvalidInput(f"{await self._described(name, migration)}, of {twin.metadata.get(MODEL_ID)}: --cancel it first")
        with tqdm(total=await self._store.count(name), unit="point", disable=self._options.quiet, file=sys.stderr) as bar:
            await self._filler(name, twin, bar.update).fill()
        migration = await self._note(name, migration, "both")
        self._tell(await self._described(name, migration))
        overlap = await self._compared(name, schema, twin, judged)
        least = self._options.require_overlap
        if least is not None and (overlap is None or overlap < least):
            raise InvalidInput(f"the overlap is {overlap}, --require-overlap {least}: not flipped, {name} answers as before")
        if not self._options.no_flip:
            await self._flip(name, schema, migration)

    async def _begun(self, name: str, schema: CollectionSchema) -> Migration:
        """Makes the twin, and then the record: whoever reads it finds the twin."""
        options = self._options
        model_id = options.to or schema.metadata.get(MODEL_ID)
        if model_id is None:
            raise InvalidInput(f"collection {name!r} does not say which model made it: name one with --to")
        old = plan_of(schema)
        plan = msgspec.structs.replace(
            old,
            dense_dim=options.dense_dim,
            multivector_dim=None,
            multivector_tokens=options.multivector_tokens,
            multivector_dtype=options.multivector_dtype,
        )
        plan = with_budget(plan, old.multivector_tokens, old.multivector_dtype)
        spec = self._encoder(model_id, None).spec
        heads = spec.heads & heads_of(schema)
        plan = settled(plan, None, heads, name, width=spec.multivector.dim if spec.multivector else 0)
        planned = await asyncio.to_thread(signed, planned_schema(plan, spec, model_id, heads), spec)
        kept = {key: value for key, value in schema.metadata.items() if key not in MODEL_KEYS | {RECORD}}
        planned = replace(planned, metadata={**kept, **planned.metadata, TWIN_OF: name})
        twin = f"{name}.new"
        while (there := await self._store.describe(twin)) is not None:
            if there.metadata.get(TWIN_OF) == name:  # an earlier run was killed before it wrote the record
                await self._store.drop(twin)
            else:
                twin += "+"
        await self._store.create(twin, planned)
        return await self._note(name, Migration(state="filling", twin=twin, since=time.time()), "filling")

    async def _flip(self, name: str, schema: CollectionSchema, migration: Migration) -> None:
        if migration.state != "both":
            raise InvalidInput(f"{await self._described(name, migration)}: only a whole copy can be flipped to")
        unread_s = migration.since + KEPT_S + 1 - time.time()
        await asyncio.sleep(min(max(unread_s, 0), KEPT_S + 1))  # until all servers have read that it migrates
        await self._filler(name, await self._twin(migration), lambda count: None).catch_up()
        began = time.monotonic()
        migration = await self._note(name, migration, "flipped")
        self._tell(f"flipped in {time.monotonic() - began:.3f} s; --rollback goes back, --finish drops the old points")
        self._tell(await self._described(name, migration))

    async def _rollback(self, name: str, schema: CollectionSchema, migration: Migration) -> None:
        if migration.state != "flipped":
            raise InvalidInput(f"{await self._described(name, migration)}: there is nothing to roll back")
        twin = await self._twin(migration)
        if await self._store.count(name) != await self._store.count(twin.stored_as or ""):  # by writers without the old model
            await self._filler(migration.twin, replace(schema, stored_as=name), lambda count: None).catch_up()
        began = time.monotonic()
        migration = await self._note(name, migration, "both")
        self._tell(f"rolled back in {time.monotonic() - began:.3f} s")
        self._tell(await self._described(name, migration))

    async def _finish(self, name: str, migration: Migration) -> None:
        if not migration.twin_answers:
            raise InvalidInput(f"{await self._described(name, migration)}: --flip comes first, or --cancel")
        await self._note(name, migration, "finishing")
        self._tell(f"waiting {KEPT_S + 1:g} s, until no process reads the old points")
        await asyncio.sleep(KEPT_S + 1)
        await self._store.replace(name, migration.twin)
        await self._store.annotate(migration.twin, {TWIN_OF: None})
        self._tell(f"{self._options.collection} is {migration.twin} now; the old points are dropped")

    async def _finish_dropped(self, name: str) -> None:
        """Ends what a killed `--finish` began. Raises UnknownCollection."""
        for twin in await self._store.collections():
            schema = await self._store.describe(twin)
            if self._options.step == "finish" and schema is not None and schema.metadata.get(TWIN_OF) == name:
                await self._store.replace(name, twin)
                await self._store.annotate(twin, {TWIN_OF: None})
                return
        raise UnknownCollection(f"there is no collection `{name}`")

    async def _finish_replaced(self, name: str, schema: CollectionSchema) -> None:
        """The same, killed after the name was an alias of the twin. Raises InvalidInput where the twin does not answer."""
        source = str(schema.metadata[TWIN_OF])
        if source in await self._store.collections():  # which has another alias
            old = await self._store.describe(source)
            migration = None if old is None else migration_of(old)
            if migration is None or (migration.state, migration.twin) != ("finishing", name):
                raise InvalidInput(f"{name} is a copy of {source}, which is migrated by its own name")
            await self._store.drop(source)
        await self._store.annotate(name, {TWIN_OF: None})

    async def _cancel(self, name: str, migration: Migration) -> None:
        if migration.twin_answers:
            raise InvalidInput(f"{await self._described(name, migration)}: --rollback comes first")
        await self._store.annotate(name, record_of(None))
        await self._store.drop(migration.twin)
        self._tell(f"{name}: the migration is given up, and {migration.twin} dropped")

    async def _note(self, name: str, migration: Migration, state: Any) -> Migration:
        noted = msgspec.structs.replace(migration, state=state)
        await self._store.annotate(name, record_of(noted))
        return noted

    async def _twin(self, migration: Migration) -> CollectionSchema:
        schema = await self._store.describe(migration.twin)
        if schema is None:
            raise StoreError(f"collection {migration.twin!r}, the copy, is gone: --cancel, and begin anew")
        return replace(schema, stored_as=migration.twin)

    def _filler(self, source: str, schema: CollectionSchema, advance: Callable[[int], Any]) -> Filler:
        return Filler(self._store, source, schema, self._embed_for(schema), advance)

    def _embed_for(self, schema: CollectionSchema) -> Embed:
        heads = sorted(heads_of(schema))

        async def embed(texts: Sequence[str]) -> Embeddings:
            encoder = await asyncio.to_thread(self._encoder, str(schema.metadata.get(MODEL_ID)), schema)
            return await asyncio.to_thread(encoder.encode, list(texts), heads, input_type="document")

        return embed

    def _encoder(self, model_id: str, schema: CollectionSchema | None) -> Encoder:
        """Of a model, with the budget of a collection's multi-vectors."""
        plan = None if schema is None else plan_of(schema)
        tokens, dtype = (None, None) if plan is None else (plan.multivector_tokens, plan.multivector_dtype)
        key = (model_id, tokens, dtype)
        if key not in self._encoders:
            config = msgspec.structs.replace(self._model, model_id=model_id, multivector_tokens=tokens, multivector_dtype=dtype)
            self._encoders[key] = Encoder.load(config=config, engine=self._engine)
        if schema is not None:
            planned = planned_schema(plan_of(schema), self._encoders[key].spec, model_id, heads_of(schema), is_there=True)
            check_fits(schema, signed(planned, self._encoders[key].spec))
        return self._encoders[key]

    def _judgements(self) -> Judgements | None:
        """Those of --judged, read before any work. Raises InvalidInput, LoadError."""
        if self._options.judged is None:
            return None
        require_extra("eval", "ir_measures")
        return read_judgements(Path(self._options.judged), self._options.split)

    async def _compared(
        self, name: str, old: CollectionSchema, new: CollectionSchema, judged: Judgements | None
    ) -> float | None:
        """Compare what both copies find, and say so; the overlap, None where it is not asked for or a model does not load."""
        if self._options.sample < 1 and judged is None:
            return None
        searchers = []
        for schema in (replace(old, stored_as=name), new):
            model_id = str(schema.metadata.get(MODEL_ID))
            try:
                encoder = await asyncio.to_thread(self._encoder, model_id, schema)
            except CollectionMismatch as error:
                if schema is new:
                    raise
                self._tell(f"not compared, since what made the old points is not at hand: {error}")
                return None
            except HybridTeiError as error:
                self._tell(f"not compared, since {model_id} does not load: {error}")
                return None
            pinned = CollectionSchemas.pinned(self._store, name, schema)
            searchers.append(Searcher(self._store, query_model(encoder, model_id), schemas=pinned))
        if judged is not None:
            self._tell(await _quality(searchers, name, judged))
        return None if self._options.sample < 1 else await self._overlap(name, searchers)

    async def _overlap(self, name: str, searchers: Sequence[Searcher]) -> float | None:
        """The mean share of the first points that both copies find, for beginnings of stored texts."""
        count = await self._store.count(name)
        records, _ = await self._store.scroll(name, limit=min(self._options.sample, max(count, 1)))
        queries = [query_of(text_of(record.id, record.payload)) for record in records]
        options = SearchOptions(limit=TOP, with_payload=False)
        found = [
            [{hit.id for hit in (await searcher.search(name, query, options)).hits} for query in queries]
            for searcher in searchers
        ]
        shares = [len(a & b) / max(len(a), len(b), 1) for a, b in zip(*found, strict=True)]
        if not shares:
            return None
        overlap = sum(shares) / len(shares)
        self._tell(f"overlap@{TOP} {overlap:.3f}: of the first {TOP} points of both, on average")
        return overlap


async def _quality(searchers: Sequence[Searcher], name: str, judged: Judgements) -> str:
    """nDCG@10 of both copies by the default search, and their difference."""
    way = Way("default", SearchOptions(), frozenset(), is_default=True)
    old, new = [(await evaluate(searcher, name, judged, chosen=[way])).results[0].ndcg for searcher in searchers]
    lead, low, high = paired_bootstrap(new - old)
    interval = f"95 % interval {low:+.4f} to {high:+.4f}, {len(judged.queries)} judged queries"
    return f"nDCG@10 {old.mean():.4f} old, {new.mean():.4f} new: {lead:+.4f} ({interval})"


def query_of(text: str) -> str:
    """The first sentence, or line, of a text."""
    return re.split(r"(?<=[.!?])\s|\n", text.strip(), maxsplit=1)[0][:QUERY_CHARACTERS]
