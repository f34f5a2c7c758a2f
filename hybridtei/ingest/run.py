"""One ingest from settings to summary: finds the model and the store, lays the parts together, and says what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import orjson

from hybridtei.batch import Head
from hybridtei.checkpoint.files import sha256_of
from hybridtei.checkpoint.fingerprint import tokenizer_sha256
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.vocabularies import read_raw
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import (
    BackendError,
    CollectionMismatch,
    InvalidInput,
    LoadError,
    StoreError,
    StoreUnavailable,
    UnsupportedHead,
)
from hybridtei.ingest.chunking import Chunker, ChunkSettings, settings_for
from hybridtei.ingest.embedders import RemoteEmbedder, vector_heads
from hybridtei.ingest.files import QUARANTINE, label_of, source_files
from hybridtei.ingest.identity import open_ledger
from hybridtei.ingest.indexing import IndexingServer, wait_indexed
from hybridtei.ingest.ledger import Ledger, Quarantine
from hybridtei.ingest.options import DEFER_INDEXING_MB, MEGABYTE, IngestOptions, IngestStats, Summary
from hybridtei.ingest.pipeline import Stopping, ingest
from hybridtei.ingest.prepare import Preparation
from hybridtei.ingest.records import ReadOptions
from hybridtei.load import find_model, text_model
from hybridtei.store import CollectionPlan, open_store, place_of, with_default
from hybridtei.store.base import CollectionSchema, Store
from hybridtei.store.collection import check_fits, check_name
from hybridtei.store.plan import planned_schema, settled, signed, spread, with_budget
from hybridtei.tasks.base import Model
from hybridtei.tasks.embed import Embed, Embedder
from hybridtei.tasks.pooling import MultivectorBudget, budget_of
from hybridtei.tasks.spans import EmbedSpans

Tell = Callable[[str], None]
FIRST_EMBEDDED_HEADS = "bba3482ef526a1f6e8f4a2515c8a773fb6eaa32eb21a11c3337db82fdd4abc5d"
RELEASE_S = 10.0  # how long a folder may still be in the hands of an ingest that was killed


def run_ingest(
    options: IngestOptions, model: ModelConfig, engine: EngineConfig, store: StoreConfig, *, tell: Tell = lambda line: None
) -> Summary:
    """Ingest a source. Raises HybridTeiError or OSError, with what to do about it; what was stored until then stays noted."""
    check_name(options.collection)
    remote = _remote(options, store)
    quarantine = Path(options.quarantine or f"{options.collection}{QUARANTINE}")
    files = list(source_files(Path(options.source), options.source_name, quarantine))
    if not files:
        raise InvalidInput(f"{options.source}: holds no files")
    store = with_default(store)
    opened = open_store(store)
    assert opened is not None
    tell(f"store     {place_of(store)}")
    reading = _read_options(options)
    if remote is not None and not options.model_named:
        model = msgspec.structs.replace(model, model_id=remote.model_id)
    spec = _spec(model, remote)
    heads = vector_heads(spec.heads, options.outputs)
    text = text_model(spec, engine)
    chunks = _chunk_settings(options, text, heads)

    def embedder_for(plan: CollectionPlan) -> Embedder:
        embedder = _embedder(options, remote, _with_budget(model, plan), engine)
        tell(f"model     {model.model_id}, {_described(embedder)}: {', '.join(sorted(heads))}")
        tell(f"chunks    {_in_words(chunks)}")
        return embedder

    chunker = Chunker(text, read_raw(spec.folder), chunks)

    def preparation_for(ledger: Ledger) -> Preparation:
        return Preparation(
            files=files,
            options=reading,
            chunker=chunker,
            ledger=ledger,
            quarantine=Quarantine(quarantine),
            settings=_settings(model, spec, heads, chunks, reading),
            stats=IngestStats(),
            label=label_of(Path(options.source), options.source_name),
            delete_missing=options.delete_missing,
        )

    try:
        outputs = _Outputs(spec, model, heads, embedder_for)
        return asyncio.run(_run(options, store, opened, outputs, preparation_for, tell=tell))
    finally:
        chunker.close()


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What is stored, of which model, and what embeds it once the collection's plan is known."""

    spec: ModelSpec
    model: ModelConfig
    heads: frozenset[Head]
    embedder_for: Callable[[CollectionPlan], Embedder]

    def planned(
        self, options: IngestOptions, existing: CollectionSchema | None, nodes: int = 1
    ) -> tuple[CollectionPlan, CollectionSchema]:
        """The plan and schema of a collection, a new one spread over `nodes`. Raises CollectionMismatch where it has others."""
        chosen = with_budget(options.plan, self.model.multivector_tokens, self.model.multivector_dtype)
        width = 0 if self.spec.multivector is None else self.spec.multivector.dim
        plan = settled(chosen, existing, self.heads, options.collection, width=width)
        if existing is None:
            plan = spread(plan, nodes)
        schema = planned_schema(plan, self.spec, self.model.model_id, self.heads, is_there=existing is not None)
        return plan, signed(schema, self.spec)


async def _run(
    options: IngestOptions,
    config: StoreConfig,
    store: Store,
    outputs: _Outputs,
    preparation_for: Callable[[Ledger], Preparation],
    *,
    tell: Tell,
) -> Summary:
    """The pipeline, and then the store's own finish; store, ledger and embedder are closed whatever happens."""
    name, done = options.collection, 0
    patience_s = 0.0 if store.kind == "server" else config.qdrant_patience  # a server's store has its own
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        try:
            existing = await _reachable(store, name)
            nodes = await _nodes(store, tell) if existing is None else 1
            plan, schema = outputs.planned(options, existing, nodes)
            if nodes > 1:
                tell(f"cluster   {nodes} nodes: {plan.shards} shards, {plan.replicas} copies of each")
            if existing is not None:
                check_fits(existing, schema, name)
            ledger, identity = await open_ledger(config, store, name, existing)
            stack.callback(ledger.close)
            preparation = preparation_for(ledger)
            stats = preparation.stats
            embedder = outputs.embedder_for(plan)  # nothing else runs yet, and Ray wants the main thread
            stack.callback(embedder.close)
            try:
                outcome = await ingest(
                    preparation,
                    embedder,
                    store,
                    name,
                    schema,
                    identity=identity,
                    defer_indexing_bytes=MEGABYTE
                    * (DEFER_INDEXING_MB if options.defer_indexing_mb is None else options.defer_indexing_mb),
                    patience_s=patience_s,
                    quiet=options.quiet,
                )
            finally:
                done = stats.documents
            if not outcome.stopped:  # an earlier run may have ended between its last batch and this
                tell("indexing")
                await store.optimize(name)
                if options.wait_indexed and isinstance(store, IndexingServer):
                    stopping = Stopping()
                    with stopping.on_signals():
                        await wait_indexed(store, name, stopping.requested, tell, quiet=options.quiet)
        except CollectionMismatch:
            raise
        except (StoreUnavailable, ConnectionError, BackendError) as error:
            kind = next(kind for kind in (StoreError, BackendError, ConnectionError) if isinstance(error, kind))
            raise kind(f"{error}\n{done:,} documents were stored; run the same command again to go on from there") from error
    path = str(preparation.quarantine.path) if len(preparation.quarantine) else None
    return Summary(name, place_of(config), stats, outcome, path, options.delete_missing)


async def _nodes(store: Store, tell: Tell) -> int:
    """The number of nodes of the store's cluster; 1 where it is none, or does not say."""
    peers = getattr(store, "peers", None)
    if peers is None:
        return 1
    try:
        nodes: int = await peers()
    except StoreError as error:
        tell(f"cluster   unknown, so shards and copies are the server's defaults, or --shards and --replicas: {error}")
        return 1
    return nodes


async def _reachable(store: Store, name: str) -> CollectionSchema | None:
    """The collection's schema, if it is there. Waits a little for the folder of an embedded engine: a process that was killed
    lets go of it a moment later."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            return await store.describe(name)
        except StoreError:
            if store.kind == "server" or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


def _remote(options: IngestOptions, store: StoreConfig) -> RemoteEmbedder | None:
    if options.url is None:
        return None
    if options.engine == "ray":
        raise InvalidInput("--url and --engine ray exclude each other: the engines are a server's, or in the cluster")
    return RemoteEmbedder(options.url, api_key=options.url_api_key, patience_s=store.qdrant_patience)


def _spec(model: ModelConfig, remote: RemoteEmbedder | None) -> ModelSpec:
    """Of the model that embeds. With a server, its files are wanted too: they say how to cut, and what is to be stored."""
    try:
        spec = find_model(model)
    except LoadError as error:
        if remote is None:
            raise
        raise LoadError(
            f"{error}\nthe server's model is needed here too, for its tokenizer: name its folder or hub id with --model-id"
        ) from error
    if spec.kind != "embedding":
        raise InvalidInput(f"{model.model_id}: is a {spec.kind}, which makes no vectors")
    if remote is not None and (offered := remote.outputs) != vector_heads(spec.heads, None):
        raise InvalidInput(
            f"{model.model_id} makes {', '.join(sorted(spec.heads))}, but the server gives {', '.join(sorted(offered))}: "
            "name the server's model with --model-id"
        )
    return spec


def _chunk_settings(options: IngestOptions, model: Model, heads: frozenset[Head]) -> ChunkSettings:
    """Raises InvalidInput for late chunks of what reads or embeds no parts of texts."""
    is_late = options.chunking == "late"
    if is_late:
        if options.no_chunking:
            raise InvalidInput("--chunking late and --no-chunking exclude each other")
        try:
            EmbedSpans((), Embed((), heads, input_type="document")).check(model.spec)
        except UnsupportedHead as error:
            raise InvalidInput(f"--chunking late: {error}") from error
    return settings_for(model, options.chunk_tokens, options.chunk_overlap, whole=options.no_chunking, late=is_late)


def _with_budget(model: ModelConfig, plan: CollectionPlan) -> ModelConfig:
    return msgspec.structs.replace(
        model, multivector_tokens=plan.multivector_tokens, multivector_dtype=plan.multivector_dtype or "float"
    )


def _embedder(
    options: IngestOptions,
    remote: RemoteEmbedder | None,
    model: ModelConfig,
    engine: EngineConfig,
) -> Embedder:
    if options.engine == "ray":
        from hybridtei.ingest.on_ray import RayEmbedder

        return RayEmbedder(model, engine, workers=options.ray_workers, address=options.ray_address)
    if remote is not None:
        remote.budget = budget_of(model) or MultivectorBudget()
    return remote or Encoder.load(config=model, engine=engine)


def _described(embedder: Any) -> str:
    return f"{embedder.backend_name}, {embedder.dtype}, in process" if isinstance(embedder, Encoder) else embedder.name


def _read_options(options: IngestOptions) -> ReadOptions:
    if options.max_record_bytes < 1:
        raise InvalidInput(f"--max-record-bytes is {options.max_record_bytes}, should be 1 or more")
    return ReadOptions.of(options)


def _settings(
    model: ModelConfig, spec: ModelSpec, heads: frozenset[Head], chunks: ChunkSettings, reading: ReadOptions
) -> bytes:
    """32 bytes that change with whatever makes other points of the same files.

    Heads of our kind count by their file: a model keeps its name when they are trained anew. Those that releases before had
    embedded do not, so that what was stored by them is not embedded again.
    """
    heads_file = next((head.file for head in (spec.multivector, spec.sparse) if head is not None and head.own), None)
    made_by = None if heads_file is None else sha256_of(heads_file)
    made_of: list[Any] = [
        model.model_id,
        model.revision,
        tokenizer_sha256(spec),
        sorted(heads),
        {name: value for name, value in asdict(chunks).items() if name != "late" or value},  # ledgers from before lack it
        msgspec.structs.asdict(reading),
        *([] if made_by in (None, FIRST_EMBEDDED_HEADS) else [made_by]),
    ]
    return blake2b(orjson.dumps(made_of), digest_size=32).digest()


def _in_words(chunks: ChunkSettings) -> str:
    if chunks.whole:
        return f"one a document, cut at {chunks.tokens} tokens"
    late = ", late: read with the text around them" if chunks.late else ""
    return f"at most {chunks.tokens} tokens, {chunks.overlap} of them repeated{late}"
