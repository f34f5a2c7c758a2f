"""Documents from files into a collection: read and cut, embed, store, each while the others work, two batches between them.

The encoder is the slow part and never waits: while it computes, the next batch is read and the last one written. Threads do
the work, the event loop only passes it on. A kill at any moment loses at most the batches on their way, and the same command
goes on from the ledger; ids are made of source and chunk, so what is sent twice is stored once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from hybridtei.batch import Head
from hybridtei.errors import StoreError
from hybridtei.ingest.chunking import source_of
from hybridtei.ingest.embedders import embed_each
from hybridtei.ingest.ledger import Ledger
from hybridtei.ingest.options import Outcome, Progress
from hybridtei.ingest.prepare import Batch, Preparation
from hybridtei.ingest.write import Writer, create_if_missing, missing_documents
from hybridtei.outputs import Embeddings
from hybridtei.store.base import CollectionSchema, Store
from hybridtei.store.collection import check_fits, heads_of
from hybridtei.tasks.embed import Embedder

log = logging.getLogger(__name__)
Embedded = tuple[Batch, Embeddings, list[str | None]]
BETWEEN = 2  # batches that wait between two stages
SAMPLE_DOCUMENTS = 256  # looked for at the start, to see whether the collection is the one the ledger tells of


@runtime_checkable
class Pipeline(Protocol):
    """What reads and embeds elsewhere, beyond this process: batches come out as they would here, those of a file in its order.

    `embedded` counts in the preparation what it skips, puts what it cannot read into its quarantine, and ends early if asked.
    """

    def embedded(self, preparation: Preparation, asked_to_stop: asyncio.Event) -> AsyncGenerator[Embedded]: ...

    def close(self) -> None: ...


class Stopping:
    """Asked for by the first SIGINT or SIGTERM: what is embedded now is still stored, no more is read. A second one cancels."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """While within; only the main thread can."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        handled = []

        def stop() -> None:
            if self.asked.is_set() and task is not None:
                task.cancel()
            self.asked.set()

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
    embedder: Embedder | Pipeline,
    store: Store,
    name: str,
    schema: CollectionSchema,
    *,
    patience_s: float = 0.0,
    quiet: bool = True,
) -> Outcome:
    """Store every document of the sources that is not stored yet; a bad one goes into quarantine and stops nothing.

    Raises CollectionMismatch before anything is done, StoreError where the store fails for longer than its patience,
    ConnectionError where an embedding server does or answers something else, BackendError where most texts fail. What was
    stored before stays, unless a new version of it is stored, or the source lacks it and `preparation.delete_missing` is set.
    """
    ledger = preparation.ledger
    strangers = await _agree(store, name, schema, ledger)
    settled = (await store.describe(name)) or schema
    writer = Writer(
        store=store,
        name=name,
        schema=settled,
        ledger=ledger,
        quarantine=preparation.quarantine,
        settings=preparation.settings,
        stats=preparation.stats,
        strangers=strangers,
        patience_s=patience_s,
    )
    stopping, progress = Stopping(), Progress(preparation.total_bytes, quiet=quiet)
    complete = False
    preparation.stats.start()
    try:
        with stopping.on_signals():
            await _flow(preparation, embedder, writer, progress, stopping, heads=heads_of(schema))
        complete = not stopping.asked.is_set()
        missing, deleted = await _settle_missing(preparation, writer) if complete else (0, 0)
    finally:
        writer.close()
        preparation.stats.stop()
        progress.close(complete=complete)
    return replace(await _outcome(store, name, ledger, stopped=not complete), missing=missing, deleted=deleted)


async def _settle_missing(preparation: Preparation, writer: Writer) -> tuple[int, int]:
    """(documents that are stored and no longer in the source, how many were deleted)."""
    keys = await asyncio.to_thread(missing_from_source, preparation)
    if not preparation.delete_missing or not may_delete(preparation):
        return len(keys) + preparation.stats.missing, 0
    await writer.delete_documents(keys)
    return 0, len(keys)


async def _agree(store: Store, name: str, schema: CollectionSchema, ledger: Ledger) -> bool:
    """Make the ledger and the collection tell the same; whether the collection has points that the ledger does not know."""
    existing = await create_if_missing(store, name, schema)
    if existing is None:
        ledger.clear()
        return False
    check_fits(existing, schema, name)
    points = await store.count(name)
    if points == 0:
        ledger.clear()
        return False
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
    embedder: Embedder | Pipeline,
    writer: Writer,
    progress: Progress,
    stopping: Stopping,
    *,
    heads: frozenset[Head],
) -> None:
    prepared: asyncio.Queue[Batch | None] = asyncio.Queue(BETWEEN)
    embedded: asyncio.Queue[Embedded | None] = asyncio.Queue(BETWEEN)
    loop = asyncio.get_running_loop()

    def show(done_bytes: int) -> None:
        preparation.stats.quarantined = len(preparation.quarantine)
        progress.show(done_bytes, preparation.stats)

    async def read(thread: ThreadPoolExecutor) -> None:
        batches = preparation.batches()
        while not stopping.asked.is_set():
            batch = await loop.run_in_executor(thread, next, batches, None)
            if batch is None:
                break
            await prepared.put(batch)
        await prepared.put(None)

    async def embed(thread: ThreadPoolExecutor, embedder: Embedder) -> None:
        encode = partial(embedder.encode, outputs=heads, input_type="document")
        while (batch := await prepared.get()) is not None:
            if not stopping.asked.is_set():
                await embedded.put(await loop.run_in_executor(thread, _embedded, encode, batch))
        await embedded.put(None)

    async def write() -> None:
        while (ready := await embedded.get()) is not None:
            await writer.write(*ready)
            show(ready[0].done_bytes)

    if isinstance(embedder, Pipeline):
        async with aclosing(embedder.embedded(preparation, stopping.asked)) as arriving:
            async for ready in arriving:
                await writer.write(*ready)
                show(ready[0].done_bytes)
    else:
        with _thread("read") as reading, _thread("embed") as embedding:
            await _together(read(reading), embed(embedding, embedder), write())
    show(0)


def _embedded(encode: Callable[[Sequence[str]], Embeddings], batch: Batch) -> Embedded:
    texts = [piece.chunk.text for piece in batch.pieces]
    if not texts:
        return batch, Embeddings(), []
    return batch, *embed_each(encode, texts)


async def _together(*stages: Any) -> None:
    """All of them to their ends, or the first failure of one, the others cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for stage in stages:
                group.create_task(stage)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The store's, where several failed: it is the one that can be mended."""
    ours = failures.subgroup(StoreError)
    found: BaseException = (ours or failures).exceptions[0]
    return found


@contextmanager
def _thread(name: str) -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def missing_from_source(preparation: Preparation) -> list[str]:
    """Keys, once the whole source was read: of documents that left their file, and of files that left the source."""
    present = {file.label for file in preparation.files}
    labels = {source_of(key) for key in preparation.ledger.stored_keys()}
    gone = {label for label in labels if _is_below(label, preparation.label) and not _may_be_there(label, present, preparation)}
    return preparation.missing + [key for key in preparation.ledger.stored_keys() if source_of(key) in gone]


def may_delete(preparation: Preparation) -> bool:
    """Whether the source yielded a document at all: an empty or unreadable one must not empty the collection."""
    return preparation.stats.documents + preparation.stats.skipped > 0


def _is_below(label: str, root: str) -> bool:
    return bool(root) and (label == root or label.startswith(f"{root}/"))


def _may_be_there(label: str, present: Set[str], preparation: Preparation) -> bool:
    """The file was found, or it is below a folder that could not be read."""
    parts = label.split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return label in present or any(preparation.quarantine.of(folder) for folder in above)
