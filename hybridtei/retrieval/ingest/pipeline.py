"""The pipeline of an ingest: threads read, cut and embed ahead, and the event loop stores.

The encoder is the slowest part and never waits: meanwhile the next batches are read and the last
one is written. A kill loses at most the batches in the queue, and the same command continues from
the stored documents. Ids are made of source and chunk, so a second upsert replaces the first.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

from tqdm.auto import tqdm

from hybridtei.batch import Head
from hybridtei.errors import (
    BackendError,
    EmptyInput,
    HybridTeiError,
    InvalidInput,
    StoreError,
    TokenizerError,
)
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest.options import MEGABYTE
from hybridtei.retrieval.ingest.prepare import Batch, Preparation
from hybridtei.retrieval.ingest.write import Writer
from hybridtei.system.own_loop import read_error

T = TypeVar("T")
Encode = Callable[..., Embeddings]
Embedded = tuple[Batch, Embeddings, list[str | None]]
# Batches read ahead, besides those in the encoder
BATCHES_AHEAD = 2
# Deleted documents named in the output
TOLD_DOCUMENTS = 100


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; a second one cancels the task. Works
    only in the main thread."""
    requested, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()
    handled = []

    def stop() -> None:
        if requested.is_set() and task is not None:
            task.cancel()
        requested.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
            handled.append(number)
        except (NotImplementedError, RuntimeError, ValueError):
            continue
    try:
        yield requested
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def ingest(
    preparation: Preparation,
    encode: Encode,
    writer: Writer | None,
    *,
    parallel: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Store every document of the sources that is not stored yet. A bad document goes into
    quarantine; the others continue.

    `writer`: None for a dry run. `encode`: `parallel` threads call it at once. After a SIGINT or
    SIGTERM nothing more is read, and embedded batches are stored. Raises StoreError if the store
    fails for longer than its patience, ConnectionError for a failing or foreign embedding server,
    BackendError if most texts fail. Stored documents stay, unless a new version is stored, or the
    source lacks them and `preparation.options.delete_missing` is set.
    """
    stats = preparation.stats
    stats.began_s = time.monotonic()
    if writer is None:
        with preparation.reader:
            await asyncio.to_thread(_count, preparation)
        await _settle_missing(preparation, None, tell)
        return
    stats.stopped = True
    try:
        with stop_on_signals() as stopping:
            await _flow(preparation, encode, writer, stopping, parallel)
        stats.stopped = stopping.is_set()
        if not stats.stopped:
            await writer.settle()
            await _settle_missing(preparation, writer, tell)
    finally:
        stats.ended_s = time.monotonic()


def _count(preparation: Preparation) -> None:
    """Count the documents that would be stored."""
    for batch in preparation.batches():
        preparation.stats.documents += sum(piece.is_last for piece in batch.pieces)
        preparation.stats.chunks += len(batch.pieces)
    preparation.stats.quarantined = len(preparation.quarantine)
    preparation.stats.ended_s = time.monotonic()


async def _settle_missing(
    preparation: Preparation, writer: Writer | None, tell: Callable[[str], None]
) -> None:
    """Count documents that the source lacks, and delete them if the option is set. Without a
    `writer` only say what would be deleted."""
    keys = missing_from_source(preparation)
    stats = preparation.stats
    deletes = preparation.options.delete_missing and bool(keys)
    if deletes and not stats.documents + stats.unchanged:
        stats.kept = "the source has no documents, so none is deleted"
    if not deletes or stats.kept is not None:
        stats.documents_missing = len(keys)
        return
    for source, document_id in keys[:TOLD_DOCUMENTS]:
        tell(f"{'deletes  ' if writer else 'would delete'} {document_id} of {source}")
    if len(keys) > TOLD_DOCUMENTS:
        tell(f"and {len(keys) - TOLD_DOCUMENTS:,} more")
    if writer is not None:
        await writer.delete_documents(keys)
    stats.documents_deleted = len(keys)


async def _flow(
    preparation: Preparation, encode: Encode, writer: Writer, stopping: asyncio.Event, parallel: int
) -> None:
    """Read and embed batches in threads, and write them in order. The first failure ends
    everything."""
    embedded: asyncio.Queue[asyncio.Future[Embedded | None] | None] = asyncio.Queue(
        parallel + BATCHES_AHEAD
    )
    loop, stats = asyncio.get_running_loop(), preparation.stats
    total_bytes = sum(file.size for file in preparation.files)
    bar = tqdm(
        total=max(total_bytes, 1) / MEGABYTE,
        disable=preparation.options.quiet,
        bar_format="{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}",
        mininterval=0.5,
    )

    def show(done_bytes: int) -> None:
        stats.quarantined = len(preparation.quarantine)
        bar.set_postfix_str(stats.in_words(), refresh=False)
        bar.update(max(0.0, done_bytes / MEGABYTE - bar.n))

    def embed(batch: Batch) -> Embedded | None:
        return None if stopping.is_set() else _embedded(encode, batch)

    async def read(reading: ThreadPoolExecutor, embedding: ThreadPoolExecutor) -> None:
        batches = preparation.batches()
        while (
            not stopping.is_set()
            and (batch := await loop.run_in_executor(reading, next, batches, None)) is not None
        ):
            future = loop.run_in_executor(embedding, embed, batch)
            # The error is raised when the batch is written
            future.add_done_callback(read_error)
            await embedded.put(future)
        await embedded.put(None)

    async def stop() -> None:
        """End the reader at a signal, also in the middle of a file."""
        await stopping.wait()
        preparation.reader.stop()

    async def write() -> None:
        while (future := await embedded.get()) is not None:
            embedded_batch = await future
            if embedded_batch is not None:
                await writer.write(*embedded_batch)
                show(embedded_batch[0].done_bytes)

    with bar:
        waiting = asyncio.create_task(stop())
        try:
            async with _threads("read") as reading, _threads("embed", parallel) as embedding:
                # Its end ends what the thread of reading waits for
                with preparation.reader:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(read(reading, embedding))
                        group.create_task(write())
        except BaseExceptionGroup as failures:
            # The store's error first, since it names the remedy
            raise (failures.subgroup(StoreError) or failures).exceptions[0] from None
        finally:
            waiting.cancel()
        show(0 if stopping.is_set() else total_bytes)


@asynccontextmanager
async def _threads(name: str, count: int = 1) -> AsyncIterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)
    try:
        yield executor
    finally:
        # The event loop must run, since the threads may call the store
        await asyncio.to_thread(executor.shutdown, wait=True, cancel_futures=True)


def _embedded(encode: Encode, batch: Batch) -> Embedded:
    if not batch.pieces:
        return batch, Embeddings(), []
    texts = [(piece.chunk.context, piece.chunk.text) for piece in batch.pieces]
    return batch, *embed_each(partial(embed_in_context, encode), texts)


def embed_in_context(encode: Encode, texts: Sequence[tuple[str, str]]) -> Embeddings:
    """The rows of (context, text). Only dense vectors read the context: in sparse and
    multi-vectors its words would count as the text's."""
    embedded = encode([text for _, text in texts])
    places = [place for place, (context, _) in enumerate(texts) if context]
    if not places or embedded.dense is None:
        return embedded
    dense = embedded.dense.copy()
    with_context = ["\n".join(texts[place]) for place in places]
    dense[places] = encode(with_context, outputs={Head.DENSE}).dense
    return replace(embedded, dense=dense)


def embed_each(
    embed: Callable[[Sequence[T]], Embeddings], texts: Sequence[T]
) -> tuple[Embeddings, list[str | None]]:
    """(the rows of the embedded texts; for each text the error's message or None).

    A failing batch is halved until the failing text is alone. Raises BackendError if none of
    several texts could be embedded, since then the engine fails. Errors that no text causes, such
    as a server's key, are raised.
    """
    parts: list[Embeddings] = []
    errors: list[HybridTeiError | None] = []

    def halve(texts: Sequence[T]) -> None:
        try:
            parts.append(embed(texts))
            errors.extend([None] * len(texts))
        except (EmptyInput, InvalidInput, TokenizerError, BackendError) as error:
            if len(texts) == 1:
                errors.append(error)
                return
            middle = len(texts) // 2
            halve(texts[:middle])
            halve(texts[middle:])

    halve(texts)
    if len(texts) > 1 and isinstance(errors[0], BackendError) and None not in errors:
        raise errors[0]
    return Embeddings.concat(parts), [None if error is None else str(error) for error in errors]


def missing_from_source(preparation: Preparation) -> list[tuple[str, str]]:
    """(label, id) of stored documents that left their file, or whose file left the source. Call it
    after reading the whole source."""
    # The labels of files, and of unreadable folders, which may still have the file
    present = {file.label for file in preparation.files if file.left_out is None}
    # Neither the file nor a folder above it is present
    gone = [
        label
        for label in preparation.stored
        if present.isdisjoint(accumulate(label.split("/"), "{}/{}".format))
    ]
    return preparation.missing + [
        (label, name) for label in gone for name in sorted(preparation.stored[label])
    ]
