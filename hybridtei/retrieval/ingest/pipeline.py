"""Documents from files into a collection, in three concurrent stages with queues of two batches: read and cut, embed, store.

The encoder is the slow part and never waits: while it computes, the next batch is read and the last one written. Threads do the
work, the event loop passes it on. A kill at any moment loses at most the batches in the queues, and the same command goes on
from what is stored; ids are made of source and chunk, so a second upsert replaces the first.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import orjson

from hybridtei.errors import StoreError
from hybridtei.inference.tasks.embed import Embedder
from hybridtei.inference.tasks.spans import SpanText
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest.embedders import embed_each
from hybridtei.retrieval.ingest.indexing import deferred_indexing
from hybridtei.retrieval.ingest.ledger import Ledger, StoredDocument
from hybridtei.retrieval.ingest.options import IngestStats, Progress
from hybridtei.retrieval.ingest.prepare import Batch, PendingChunk, Preparation
from hybridtei.retrieval.ingest.write import Writer
from hybridtei.retrieval.store.base import CollectionSchema, Store

Embedded = tuple[Batch, Embeddings, list[str | None]]
QUEUE_BATCHES = 2  # between two stages
TOLD_DOCUMENTS = 100  # of those that are deleted


class Stopping:
    """Stops an ingest: after the first SIGINT or SIGTERM nothing more is read, and embedded batches are stored; a second
    cancels.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handles both signals within the block; only the main thread can."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        handled = []

        def stop() -> None:
            if self.requested.is_set() and task is not None:
                task.cancel()
            self.requested.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, stop)
                handled.append(number)
            except (NotImplementedError, RuntimeError, ValueError):
                continue
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


async def ingest(
    preparation: Preparation,
    embedder: Embedder,
    store: Store,
    name: str,
    schema: CollectionSchema | None,
    *,
    encode_settings: Mapping[str, Any],
    defer_indexing_bytes: float = math.inf,
    patience_s: float = 0.0,
    tell: Callable[[str], None] = lambda line: None,
) -> IngestStats:
    """Store every document of the sources that is not stored yet; a bad one goes into quarantine and does not stop the others.

    `schema`: the collection's; None if a dry run finds none. `encode_settings`: arguments of `embedder.encode`.
    `defer_indexing_bytes`: a server indexes after a run that reads so many, not meanwhile.
    Raises StoreError where the store fails for longer than its patience, ConnectionError where an embedding server does or is
    another program, BackendError where most texts fail. Stored documents stay, unless a new version of them is stored, or the
    source lacks them and `preparation.options.delete_missing` is set.
    """
    ledger = Ledger(store, name, 0 if schema is None else await store.count(name))
    stats = preparation.stats
    stats.start()
    await _compare(preparation, ledger)
    stats.points = ledger.count
    if schema is None or preparation.options.dry_run:
        await asyncio.to_thread(_count, preparation)
        await _settle_missing(preparation, None, tell)
        return stats
    stopping, progress = Stopping(), Progress(preparation.total_bytes, quiet=preparation.options.quiet)
    writer, stats.stopped = Writer(ledger, schema, preparation, patience_s), True
    try:
        with stopping.on_signals():
            is_large = preparation.unread_bytes >= defer_indexing_bytes
            async with deferred_indexing(store, name, is_large=is_large):
                await _flow(preparation, embedder, writer, progress, stopping, encode_settings=encode_settings)
        stats.stopped = stopping.requested.is_set()
        if not stats.stopped:
            await _settle_missing(preparation, writer, tell)
    finally:
        writer.close()
        stats.stop()
        progress.close(complete=not stats.stopped)
    stats.points = await store.count(name)
    return stats


async def _compare(preparation: Preparation, ledger: Ledger) -> None:
    """Find what the collection has of the source; later comparisons ask it from the thread that reads."""
    loop = asyncio.get_running_loop()

    def lookup(keys: Sequence[str]) -> Mapping[str, StoredDocument]:
        return asyncio.run_coroutine_threadsafe(ledger.documents(keys), loop).result() if keys else {}

    preparation.lookup = lookup
    preparation.stored = await ledger.keys_below(preparation.source.labels)
    await asyncio.to_thread(preparation.find_unchanged)


def _count(preparation: Preparation) -> None:
    """Count what would be stored."""
    for batch in preparation.batches():
        preparation.stats.documents += sum(piece.is_last for piece in batch.pieces)
        preparation.stats.chunks += len(batch.pieces)
    preparation.stats.quarantined = len(preparation.quarantine)
    preparation.stats.stop()


async def _settle_missing(preparation: Preparation, writer: Writer | None, tell: Callable[[str], None]) -> None:
    """Delete documents that the source lacks, if that is asked for, and count them. Without a `writer` it only says what it
    would delete."""
    keys, stats = missing_from_source(preparation), preparation.stats
    deletes = preparation.options.delete_missing and bool(keys)
    if deletes and not stats.documents + stats.skipped:
        stats.kept = "it yielded none at all, so none is deleted"
    elif deletes and preparation.source.is_taken_over:
        stats.kept = "the collection is of 0.1, which did not note whose they are: the next ingest deletes them"
    if not deletes or stats.kept is not None:
        stats.missing = len(keys)
        return
    for key in keys[:TOLD_DOCUMENTS]:
        source, document_id = orjson.loads(key)
        tell(f"{'deletes  ' if writer else 'would delete'} {document_id} of {source}")
    if len(keys) > TOLD_DOCUMENTS:
        tell(f"and {len(keys) - TOLD_DOCUMENTS:,} more")
    if writer is not None:
        await writer.delete_documents(keys)
    stats.deleted = len(keys)


async def _flow(
    preparation: Preparation,
    embedder: Embedder,
    writer: Writer,
    progress: Progress,
    stopping: Stopping,
    *,
    encode_settings: Mapping[str, Any],
) -> None:
    prepared: asyncio.Queue[Batch | None] = asyncio.Queue(QUEUE_BATCHES)
    parallel = getattr(embedder, "parallel", 1)
    embedded: asyncio.Queue[asyncio.Future[Embedded | None] | None] = asyncio.Queue(max(QUEUE_BATCHES, parallel + 1))
    loop = asyncio.get_running_loop()

    def show(done_bytes: int) -> None:
        preparation.stats.quarantined = len(preparation.quarantine)
        progress.show(done_bytes, preparation.stats)

    async def read(thread: ThreadPoolExecutor) -> None:
        batches = preparation.batches()
        while not stopping.requested.is_set():
            batch = await loop.run_in_executor(thread, next, batches, None)
            if batch is None:
                break
            await prepared.put(batch)
        await prepared.put(None)

    def embed_now(batch: Batch) -> Embedded | None:
        return None if stopping.requested.is_set() else _embedded(encode, batch)

    async def embed(threads: ThreadPoolExecutor) -> None:
        while (batch := await prepared.get()) is not None:
            future = loop.run_in_executor(threads, embed_now, batch)
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised where it is written
            await embedded.put(future)
        await embedded.put(None)

    async def write() -> None:
        while (future := await embedded.get()) is not None:
            if (ready := await future) is not None:
                await writer.write(*ready)
                show(ready[0].done_bytes)

    encode = partial(embedder.encode, input_type="document", **encode_settings)
    async with _threads("read") as reading, _threads("embed", parallel) as embedding:
        await _together(read(reading), embed(embedding), write())
    show(0)


def _embedded(encode: Callable[..., Embeddings], batch: Batch) -> Embedded:
    if not batch.pieces:
        return batch, Embeddings(), []
    if batch.pieces[0].chunk.window is None:
        return batch, *embed_each(encode, [piece.chunk.text for piece in batch.pieces])
    parts = span_texts_of(batch.pieces)

    def embed(parts: Sequence[SpanText]) -> Embeddings:
        return encode([part.text for part in parts], spans=[part.spans for part in parts])

    embeddings, reasons = embed_each(embed, parts)
    return batch, embeddings, [reason for part, reason in zip(parts, reasons, strict=True) for _ in part.spans]


def span_texts_of(pieces: Sequence[PendingChunk]) -> list[SpanText]:
    """The windows of late chunks, each with the chunks that follow each other in it."""
    parts = []
    for (pending, window), group in groupby(pieces, lambda piece: (piece.pending, piece.chunk.window)):
        assert window is not None
        begin, end = window
        spans = [(piece.chunk.start - begin, piece.chunk.end - begin) for piece in group]
        parts.append(SpanText(pending.document.indexed_text[begin:end], spans))
    return parts


async def _together(*stages: Any) -> None:
    """Runs all stages to their ends; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for stage in stages:
                group.create_task(stage)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The store's error, where several stages failed: it tells what to do."""
    first: BaseException = (failures.subgroup(StoreError) or failures).exceptions[0]
    return first


@asynccontextmanager
async def _threads(name: str, count: int = 1) -> AsyncIterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)
    try:
        yield executor
    finally:  # the event loop goes on, since what it still does may ask the store
        await asyncio.to_thread(executor.shutdown, wait=True, cancel_futures=True)


def missing_from_source(preparation: Preparation) -> list[str]:
    """Keys of stored documents that left their file, or whose file left the source, once the whole source was read."""
    present = {file.label for file in preparation.files}
    gone = [label for label in preparation.stored if not _may_be_there(label, present, preparation)]
    return preparation.missing + [key for label in gone for key in sorted(preparation.stored[label])]


def _may_be_there(label: str, present: Set[str], preparation: Preparation) -> bool:
    """Whether the file is in the source, or below a folder that could not be read."""
    parts = label.split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return label in present or any(preparation.quarantine.of(folder) for folder in above)
