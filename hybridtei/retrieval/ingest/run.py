"""Runs one ingest from settings to summary: finds the model and the store, connects the parts, and
reports the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Unpack

import msgspec
import orjson

from hybridtei.batch import VECTORS, Head
from hybridtei.client import Client
from hybridtei.config import (
    EMBEDDED_MODEL,
    EngineConfig,
    ModelConfig,
    StoreConfig,
)
from hybridtei.encoder import Encoder
from hybridtei.errors import (
    BackendError,
    InvalidInput,
    LoadError,
    NoKey,
    StoreError,
    StoreUnavailable,
)
from hybridtei.inference.load import find_model, text_model
from hybridtei.keywords import check_names
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.tokenizer.vocabularies import read_raw
from hybridtei.models.fingerprint import fingerprint_of_loaded, model_of
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest.chunking import Chunker, ChunkSettings, settings_for
from hybridtei.retrieval.ingest.files import QUARANTINE, Quarantine, check_source, source_files
from hybridtei.retrieval.ingest.ledger import (
    Source,
    StoredDocuments,
    stored_documents,
)
from hybridtei.retrieval.ingest.options import (
    IngestKeywords,
    IngestOptions,
    IngestStats,
    ReadOptions,
    Summary,
)
from hybridtei.retrieval.ingest.pipeline import ingest as run_pipeline
from hybridtei.retrieval.ingest.pipeline import stop_on_signals
from hybridtei.retrieval.ingest.prepare import Preparation
from hybridtei.retrieval.ingest.reader import Reader
from hybridtei.retrieval.ingest.write import Writer, wait_indexed
from hybridtei.retrieval.store import open_store, place_of
from hybridtei.retrieval.store.base import CollectionSchema, Store
from hybridtei.retrieval.store.collection import CollectionSchemas, check_fits, check_name
from hybridtei.retrieval.store.plan import (
    FINGERPRINT,
    budget_of_plan,
    kept,
    layout_of,
    new_schema,
    plan_of,
    signed,
    spread,
    with_budget,
)
from hybridtei.retrieval.store.proof import proof_of
from hybridtei.retrieval.store.query import CollectionPlan, indexes_of

Tell = Callable[[str], None]
REQUEST_TIMEOUT_S = 300.0
# The way in which files become texts and chunks. A new one does not embed stored documents again
# unless they are reread.
READING = 4


def ingest(
    source: str | Path,
    collection: str,
    embedder: Any = None,
    store: StoreConfig | str | Path | None = None,
    *,
    engine_config: EngineConfig | None = None,
    tell: Tell | None = None,
    **options: Unpack[IngestKeywords],
) -> Summary:
    """Embed the documents of a file or folder and store them in a collection: `hybridtei ingest`.
    Call it again to continue after a stop, or to store changes.

    `embedder`: an `Encoder`, a `Client`, or the `ModelConfig` of a model, loaded only if there is
    text to embed; None: the embedded model. `store`: a `StoreConfig`, Qdrant's address, or an
    embedded engine's folder; None: `./qdrant`. `tell`: called with lines of progress. `options`:
    the command's other flags, such as `delete_missing=True` or `shards=3`. Raises TypeError for an
    unknown option, HybridTeiError or OSError, naming the remedy. Documents stored until then stay.
    """
    check_names("ingest()", options, IngestKeywords.__annotations__)
    values: dict[str, Any] = {**options}
    plan = {name: values.pop(name) for name in CollectionPlan.__struct_fields__ if name in values}
    values.setdefault("plan", CollectionPlan(**plan))
    if not isinstance(store, StoreConfig):
        place = None if store is None else str(store)
        store = StoreConfig(qdrant_path=place)
        if place and "://" in place:
            store = StoreConfig(qdrant_url=place)
    request = IngestOptions(source=str(source), collection=collection, **values)
    work = _Ingest(
        request,
        embedder,
        engine_config or EngineConfig(),
        store,
        tell or (lambda line: None),
    ).run()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A notebook's own loop runs here already
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class _Ingest:
    """One ingest. The constructor checks the settings; `run` calls the store."""

    def __init__(
        self,
        options: IngestOptions,
        embedder: Any,
        engine: EngineConfig,
        config: StoreConfig,
        tell: Tell,
    ) -> None:
        check_name(options.collection)
        check_source(Path(options.source))
        if options.max_record_bytes < 1:
            raise InvalidInput(
                f"--max-record-bytes is {options.max_record_bytes}, should be 1 or more"
            )
        if options.engine == "ray":
            if options.url is not None:
                raise InvalidInput(
                    "--url and --engine ray exclude each other: either a server or the cluster "
                    "embeds"
                )
            from hybridtei.retrieval.ray import check

            check(options.ray_workers)
        self.options, self.engine, self.config, self.tell = options, engine, config, tell
        model = embedder if isinstance(embedder, ModelConfig) else ModelConfig()
        encoder = None if embedder is model else embedder
        self.is_owned = encoder is None
        if encoder is None and options.url is not None:
            limits = {"timeout_s": REQUEST_TIMEOUT_S, "patience_s": config.qdrant_patience}
            encoder = Client(options.url, api_key=options.url_api_key, **limits)
        # None: `_loader` loads the model when it is needed
        self.encoder = encoder
        self.store = open_store(config)
        tell(f"store     {place_of(config)}")
        served = _served(encoder) if isinstance(encoder, Client) else None
        # The default: the user named no model
        if encoder is not None and model.model_id == EMBEDDED_MODEL:
            model_id = encoder.model_id if served is None else str(served["model_id"])
            model = msgspec.structs.replace(model, model_id=model_id)
        self.model = model
        self.spec = getattr(encoder, "spec", None) or _spec(model, served)
        # Of the files that were loaded: by the server, if one embeds
        loaded = served and served["hybridtei"].get("fingerprint")
        self.fingerprint = model_of(loaded or fingerprint_of_loaded(self.spec))
        self.heads = vector_heads(self.spec.heads, options.outputs)
        self.text = text_model(self.spec, engine)
        self.chunks = settings_for(
            self.text,
            options.chunk_tokens,
            options.chunk_overlap,
            whole=options.no_chunking,
            headings=options.headings,
        )
        tell(f"chunks    {self.chunks.in_words()}")

    async def run(self) -> Summary:
        """Run the pipeline, and finish the store's work. Closes everything in any case."""
        options, name, store, tell = self.options, self.options.collection, self.store, self.tell
        stats = IngestStats()
        writer: Writer | None = None
        async with AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            try:
                existing = await store.describe(name)
                schema = await self._planned(store, existing)
                source = Source.of(Path(options.source), existing, options.source_name)
                stored: StoredDocuments = {}
                if existing is not None:
                    stats.points = await store.count(name)
                    if not options.dry_run:
                        await store.index(name, indexes_of(options.plan.index))
                    stored = await stored_documents(store, name, source)
                preparation = self._preparation(stack, source, stored, stats)
                load = self._loader(stack)
                choices: dict[str, Any] = {"outputs": self.heads, "input_type": "document"}
                if Head.MULTIVECTOR in self.heads:
                    choices["multivector"] = budget_of_plan(plan_of(schema))

                # Loads the embedder at the first text
                def encode(texts: Any, **settings: Any) -> Any:
                    return load().encode(texts, **choices | settings)

                if existing is not None:
                    await self._prove(store, existing, schema, encode)
                if not options.dry_run:
                    if existing is None or options.engine == "ray":
                        # Before the collection is created, so that a failed load leaves none; Ray
                        # needs the main thread
                        load()
                    existing, _ = await CollectionSchemas(store).collection(name, schema)
                    # Another process may have added a source meanwhile
                    source = Source.of(Path(options.source), existing, options.source_name)
                    if source.record:
                        await store.annotate(name, source.record)
                    # A server's store has a patience of its own
                    patience_s = 0.0 if store.kind == "server" else self.config.qdrant_patience
                    writer = Writer(store, name, existing, preparation, patience_s)
                parallel = load().parallel if options.engine == "ray" else 1
                await run_pipeline(preparation, encode, writer, parallel=parallel, tell=tell)
                if writer is not None:
                    stats.points = await store.count(name)
                # Also without new documents: an earlier run may have ended before this step
                if writer is not None and not stats.stopped:
                    await self._index(store)
            except (StoreUnavailable, ConnectionError, BackendError, NoKey) as error:
                done = (
                    f"{stats.documents:,} documents were stored; run the same command again to "
                    "continue from there"
                )
                error.args = (f"{error}\n{done}",)
                raise
        rejected = str(preparation.quarantine.path) if len(preparation.quarantine) else None
        report = list(preparation.quarantine.report)
        return Summary(name, place_of(self.config), stats, rejected, options.dry_run, report)

    async def _planned(self, store: Store, existing: CollectionSchema | None) -> CollectionSchema:
        """The schema that this ingest fills; a new collection is spread over the cluster. Raises
        CollectionMismatch if the collection has another one."""
        name, spec, model_id = self.options.collection, self.spec, self.model.model_id
        plan = with_budget(
            self.options.plan, self.model.multivector_tokens, self.model.multivector_dtype
        )
        if existing is None:
            if (nodes := await _nodes(store, self.tell)) > 1:
                plan = spread(plan, nodes)
                self.tell(
                    f"cluster   {nodes} nodes: {plan.shards} shards, {plan.replicas} copies of each"
                )
            return new_schema(spec, model_id, plan, self.fingerprint, self.heads)
        plan = kept(plan, existing, name)
        schema = layout_of(spec, model_id, plan, self.heads, is_there=True)
        schema = signed(schema, self.fingerprint)
        check_fits(existing, schema, name)
        return schema

    async def _prove(
        self,
        store: Store,
        existing: CollectionSchema,
        schema: CollectionSchema,
        encode: Callable[[Any], Embeddings],
    ) -> None:
        """Compare stored texts if the collection or the model has no fingerprint, and give the
        collection the model's. Raises CollectionMismatch."""
        fingerprint, name = schema.metadata.get(FINGERPRINT), self.options.collection
        if FINGERPRINT in existing.metadata and fingerprint is not None:
            return

        async def embed(texts: Sequence[str]) -> Embeddings:
            return await asyncio.to_thread(encode, texts)

        is_proved, _ = await proof_of(store, name, existing, embed, self.model.model_id)
        if is_proved and fingerprint is not None and not self.options.dry_run:
            await store.annotate(name, {FINGERPRINT: fingerprint})

    def _preparation(
        self, stack: AsyncExitStack, source: Source, stored: StoredDocuments, stats: IngestStats
    ) -> Preparation:
        """The source's files and settings. Raises InvalidInput if there are no files."""
        options = self.options
        quarantine = Path(options.quarantine or f"{options.collection}{QUARANTINE}")
        files = list(
            source_files(
                Path(options.source),
                source.label,
                quarantine,
                source.known,
                include=_patterns(options.include),
                exclude=_patterns(options.exclude),
            )
        )
        if all(file.left_out is not None for file in files):
            raise InvalidInput(f"{options.source}: holds no files")
        chunker = Chunker(self.text, read_raw(self.spec.folder), self.chunks)
        stack.callback(chunker.close)
        # Its process starts while the model is loaded
        reader = stack.enter_context(Reader())
        return Preparation(
            files=files,
            reader=reader,
            options=options,
            chunker=chunker,
            quarantine=Quarantine(quarantine),
            settings=settings_hash(self.heads, self.chunks, options),
            earlier=earlier_hashes(self.heads, self.chunks, options),
            source=source,
            stored=stored,
            stats=stats,
        )

    def _loader(self, stack: AsyncExitStack) -> Callable[[], Any]:
        """A function that returns the embedder. The first call loads it, since a run without new
        text needs none."""

        @cache
        def load() -> Any:
            loaded = self.encoder or _embedder(self.options, self.model, self.engine)
            if self.is_owned:
                stack.callback(loaded.close)
                # The fingerprint is of the files that were there before the collection was made
                if (changed := self.spec.loaded_files.changed()) is not None:
                    raise LoadError(
                        f"{changed} has changed since this ingest began: run it again, for the "
                        "model that is there now"
                    )
            if isinstance(loaded, Client):
                what = f"{loaded.url}, {loaded.info()['model_dtype']}"
            else:
                what = (
                    getattr(loaded, "name", None)
                    or f"{loaded.backend_name}, {loaded.dtype}, in process"
                )
            self.tell(f"model     {self.model.model_id}, {what}: {', '.join(sorted(self.heads))}")
            return loaded

        return load

    async def _index(self, store: Store) -> None:
        self.tell("indexing")
        name = self.options.collection
        await store.optimize(name)
        if self.options.wait_indexed and store.kind == "server":
            with stop_on_signals() as stop:
                await wait_indexed(store, name, stop, self.tell, quiet=self.options.quiet)


def _patterns(text: str | None) -> list[str]:
    return [pattern.strip() for pattern in (text or "").split(",") if pattern.strip()]


async def _nodes(store: Any, tell: Tell) -> int:
    """The number of nodes of a server's cluster; 1 without a cluster, or if the server does not
    tell."""
    try:
        nodes: int = await store.peers() if store.kind == "server" else 1
    except StoreError as error:
        tell(
            "cluster   unknown, so shards and copies are the server's defaults, or --shards and "
            f"--replicas: {error}"
        )
        return 1
    return nodes


def _served(client: Client) -> dict[str, Any]:
    """The facts of an embedding server. Raises InvalidInput for any other server."""
    facts = client.info()
    if facts["hybridtei"].get("role") != "embedding":
        raise InvalidInput(f"{client.url}: serves no embedding model")
    return facts


def vector_heads(available: frozenset[Head], names: Sequence[str] | None) -> frozenset[Head]:
    """The outputs to store: `names`, or all of the model's. Raises InvalidInput for an output that
    the model lacks."""
    has = available & VECTORS
    if names is None:
        return has
    for name in names:
        if name not in has:
            raise InvalidInput(f"--outputs names {name!r}; the model has {', '.join(sorted(has))}")
    return frozenset(map(Head, names))


def _spec(model: ModelConfig, served: dict[str, Any] | None) -> ModelSpec:
    """The spec of the embedding model. A server's model files are needed too: they determine chunks
    and outputs."""
    try:
        spec = find_model(model)
    except LoadError as error:
        if served is None:
            raise
        raise LoadError(
            f"{error}\nthe server's model is needed here too, for its tokenizer: name its folder "
            "or hub id with --model-id"
        ) from error
    if spec.role != "embedding":
        raise InvalidInput(f"{model.model_id}: is a {spec.role}, which makes no vectors")
    if served is not None:
        offered = VECTORS.intersection(map(Head, served["hybridtei"]["outputs"]))
        if offered != vector_heads(spec.heads, None):
            raise InvalidInput(
                f"{model.model_id} makes {', '.join(sorted(spec.heads))}, but the server gives "
                f"{', '.join(sorted(offered))}: name the server's model with --model-id"
            )
    return spec


def _embedder(options: IngestOptions, model: ModelConfig, engine: EngineConfig) -> Any:
    if options.engine != "ray":
        return Encoder.load(config=model, engine=engine)
    from hybridtei.retrieval.ray import RayEmbedder

    return RayEmbedder(model, engine, workers=options.ray_workers, address=options.ray_address)


def settings_hash(heads: frozenset[Head], chunks: ChunkSettings, reading: ReadOptions) -> str:
    """Hash of every setting that affects stored points, except the model, which the collection
    records."""
    return _hash([READING, sorted(heads), asdict(chunks), reading.as_dict()])


def earlier_hashes(
    heads: frozenset[Head], chunks: ChunkSettings, reading: ReadOptions
) -> list[str]:
    """The hashes that earlier readings made of the same settings. The first two had no headings.
    `late` was a setting of the first."""
    names, settings, fields = sorted(heads), asdict(chunks), reading.as_dict()
    third = _hash([3, names, settings, fields])
    if chunks.headings:
        return [third]
    del settings["headings"]
    second = _hash([2, names, settings, fields])
    first = _hash([names, settings | {"late": False}, fields])
    return [third, second, first]


def _hash(settings: list[Any]) -> str:
    return blake2b(orjson.dumps(settings), digest_size=8).hexdigest()
