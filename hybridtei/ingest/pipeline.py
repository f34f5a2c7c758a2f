"""Documents from files into a collection, in three concurrent stages with queues of two batches: read and cut, embed, store.

The encoder is the slow part and never waits: while it computes, the next batch is read and the last one written. Threads do the
work, the event loop passes it on. A kill at any moment loses at most the batches in the queues, and the same command goes on
from the ledger; ids are made of source and chunk, so a second upsert replaces the first.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from hybridtei.batch import Head
from hybridtei.errors import StoreError
from hybridtei.ingest.chunking import source_of
from hybridtei.ingest.embedders import embed_each
from hybridtei.ingest.identity import agree, new_id
from hybridtei.ingest.indexing import deferred_indexing
from hybridtei.ingest.ledger import Ledger
from hybridtei.ingest.options import Outcome, Progress
from hybridtei.ingest.prepare import Batch, PendingChunk, Preparation
from hybridtei.ingest.write import Writer, missing_documents
from hybridtei.outputs import Embeddings
from hybridtei.store.base import CollectionSchema, Store
from hybridtei.store.collection import heads_of
from hybridtei.tasks.embed import Embedder
from hybridtei.tasks.spans import SpanText

log = logging.getLogger(__name__)
Embedded = tuple[Batch, Embeddings, list[str | None]]
QUEUE_BATCHES = 2  # between two stages
SAMPLE_DOCUMENTS = 256  # retrieved at the start, to check that the collection is the ledger's


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
    schema: CollectionSchema,
    *,
    identity: str | None = None,
    defer_indexing_bytes: float = math.inf,
    patience_s: float = 0.0,
    quiet: bool = True,
) -> Outcome:
    """Store every document of the sources that is not stored yet; a bad one goes into quarantine and does not stop the others.

    `identity`: of a collection that this makes, as `identity.open_ledger` has it.
    `defer_indexing_bytes`: a server indexes after a run that reads so many, not meanwhile.
    Raises CollectionMismatch before anything is done, StoreError where the store fails for longer than its patience,
    ConnectionError where an embedding server does or is another program, BackendError where most texts fail. Stored documents
    stay, unless a new version of them is stored, or the source lacks them and `preparation.delete_missing` is set.
    """
    ledger = preparation.ledger
    existing = await agree(store, name, schema, ledger, identity or new_id(), quiet=quiet)
    has_unknown_points = await _check_stored(store, name, ledger)
    writer = Writer(
        store=store,
        name=name,
        schema=existing,
        ledger=ledger,
        quarantine=preparation.quarantine,
        settings=preparation.settings,
        stats=preparation.stats,
        has_unknown_points=has_unknown_points,
        patience_s=patience_s,
    )
    stopping, progress = Stopping(), Progress(preparation.total_bytes, quiet=quiet)
    complete = False
    preparation.stats.start()
    try:
        with stopping.on_signals():
            is_large = preparation.unread_bytes >= defer_indexing_bytes
            async with deferred_indexing(store, name, is_large=is_large):
                await _flow(preparation, embedder, writer, progress, stopping, heads=heads_of(schema))
        complete = not stopping.requested.is_set()
        missing, deleted = await _settle_missing(preparation, writer) if complete else (0, 0)
    finally:
        writer.close()
        preparation.stats.stop()
        progress.close(complete=complete)
    return replace(await _outcome(store, name, ledger, stopped=not complete), missing=missing, deleted=deleted)


async def _settle_missing(preparation: Preparation, writer: Writer) -> tuple[int, int]:
    """(stored documents that the source no longer has, number of deleted documents)."""
    keys = await asyncio.to_thread(missing_from_source, preparation)
    if not preparation.delete_missing or not may_delete(preparation):
        return len(keys) + preparation.stats.missing, 0
    await writer.delete_documents(keys)
    return 0, len(keys)


async def _check_stored(store: Store, name: str, ledger: Ledger) -> bool:
    """Remove documents from the ledger that the collection has lost. Returns whether it has points not in the ledger."""
    points = await store.count(name)
    gone = await missing_documents(store, name, ledger, sample=SAMPLE_DOCUMENTS) if points >= ledger.chunks else [""]
    if gone:
        gone = await missing_documents(store, name, ledger)
        log.warning("%d documents were stored and are gone from the collection: they are done again", len(gone))
        await asyncio.to_thread(ledger.remove, gone)
    return points != ledger.chunks


async def _outcome(store: Store, name: str, ledger: Ledger, *, stopped: bool) -> Outcome:
    points, expected, lost = await store.count(name), ledger.chunks, 0
    if points < expected:
        gone = await missing_documents(store, name, ledger)
        await asyncio.to_thread(ledger.remove, gone)
        lost = len(gone)
    return Outcome(points, expected, lost, stopped)


async def _flow(
    preparation: Preparation,
    embedder: Embedder,
    writer: Writer,
    progress: Progress,
    stopping: Stopping,
    *,
    heads: frozenset[Head],
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

    encode = partial(embedder.encode, outputs=heads, input_type="document")
    with _threads("read") as reading, _threads("embed", parallel) as embedding:
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


@contextmanager
def _threads(name: str, count: int = 1) -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def missing_from_source(preparation: Preparation) -> list[str]:
    """Keys of stored documents that left their file, or whose file left the source, once the whole source was read."""
    present = {file.label for file in preparation.files}
    labels = {source_of(key) for key in preparation.ledger.stored_keys()}
    gone = {label for label in labels if _is_below(label, preparation.label) and not _may_be_there(label, present, preparation)}
    return preparation.missing + [key for key in preparation.ledger.stored_keys() if source_of(key) in gone]


def may_delete(preparation: Preparation) -> bool:
    """Whether the source has a document at all: an empty or unreadable one must not empty the collection."""
    return preparation.stats.documents + preparation.stats.skipped > 0


def _is_below(label: str, root: str) -> bool:
    return bool(root) and (label == root or label.startswith(f"{root}/"))


def _may_be_there(label: str, present: Set[str], preparation: Preparation) -> bool:
    """Whether the file is in the source, or below a folder that could not be read."""
    parts = label.split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return label in present or any(preparation.quarantine.of(folder) for folder in above)
