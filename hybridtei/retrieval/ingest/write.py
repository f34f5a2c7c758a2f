"""Writes embedded chunks into a collection: every change of an ingest to a store.

A document is stored completely or not at all, and only a complete new version replaces a stored one. A document with a chunk
that cannot be embedded or stored goes into quarantine, and its stored version stays. So chunks of an already stored document
wait for its last chunk. Surplus chunks of a longer old version are deleted before the new one is written: after a kill in
between, the document is incomplete and is ingested again.

A server's indexing is deferred until a large ingest has ended, since the graphs of its segments would soon be merged and made
again. The indexing threshold is 0 (never) meanwhile, and is restored even after an error. The old value is saved in the
collection's metadata first: after a kill, or if the server is away, the next ingest restores it.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any

from hybridtei.errors import BackendError, InvalidPoint, StoreError
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest.chunking import Rejection, payload_of
from hybridtei.retrieval.ingest.ledger import IDS_AT_ONCE, Ledger
from hybridtei.retrieval.ingest.prepare import Batch, PendingChunk, PendingDocument, Preparation
from hybridtei.retrieval.store.base import CollectionSchema, Stored
from hybridtei.retrieval.store.plan import fit_to_schema
from hybridtei.retrieval.store.points import check_points, point_id, to_points
from hybridtei.system.retries import retry_unavailable

log = logging.getLogger(__name__)
RECENT_TEXTS = 50  # if more than half of the last texts failed (this many), the engine is at fault, not the texts
MAX_HELD_BYTES = 64_000_000  # of vectors in memory; further ones go to a temporary file


class _Held:
    """Points of `pending`, the stored document whose new version is not completely read yet."""

    def __init__(self) -> None:
        self._file: Any = SpooledTemporaryFile(max_size=MAX_HELD_BYTES)  # noqa: SIM115 - open until `close`
        self.pending: PendingDocument | None = None
        self._parts = 0

    def add(self, pending: PendingDocument, points: list[Stored]) -> None:
        pickle.dump(
            points, self._file, protocol=5
        )  # a nameless file, which only this process can read
        self.pending, self._parts = pending, self._parts + 1

    def parts(self) -> Iterator[list[Stored]]:
        self._file.seek(0)
        for _ in range(self._parts):
            yield pickle.load(self._file)

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.pending, self._parts = None, 0

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Writer:
    """`patience_s`: how long to retry a change, if the store does not retry itself."""

    schema: CollectionSchema
    preparation: Preparation
    patience_s: float
    _recent: deque[bool] = field(
        default_factory=lambda: deque(maxlen=RECENT_TEXTS)
    )  # True for each text that failed
    _held: _Held = field(default_factory=_Held)

    @property
    def ledger(self) -> Ledger:
        return self.preparation.ledger

    async def write(
        self, batch: Batch, embeddings: Embeddings, reasons: Sequence[str | None]
    ) -> None:
        """Store and record a batch, except documents that wait for chunks of later batches.

        `embeddings`: a row for each piece without an error. Raises StoreError; then nothing of the batch is recorded, even if
        some is stored. Raises BackendError, after storing the good pieces, if more than half of the last 50 texts failed.
        """
        accepted = [
            piece for piece, reason in zip(batch.pieces, reasons, strict=True) if reason is None
        ]
        embeddings = fit_to_schema(embeddings, self.schema)
        points, objections = await asyncio.to_thread(self._checked_points, accepted, embeddings)
        remaining = iter(objections)
        reasons = [next(remaining) if reason is None else reason for reason in reasons]
        for piece, reason in zip(batch.pieces, reasons, strict=True):
            if reason is not None:
                self._fail(piece, reason)
        complete = dict.fromkeys(
            piece.pending for piece in batch.pieces if piece.is_last and not piece.pending.failed
        )
        await self._delete_stale(complete)
        await self._store(accepted, points, complete)
        await self._delete_failed(batch)
        await asyncio.to_thread(self._note, batch, complete)
        self._stop_if_most_fail(reasons)

    def close(self) -> None:
        """Drop the chunks that wait for the rest of their document."""
        self._held.close()

    async def delete_documents(self, keys: Sequence[str]) -> None:
        """Delete documents, their first chunks last, so that after a kill in between the next ingest finds the rest."""
        for start in range(0, len(keys), IDS_AT_ONCE):
            found = await self.ledger.documents(keys[start : start + IDS_AT_ONCE])
            await self._delete(
                [
                    point_id(key, n)
                    for key, one in found.items()
                    for n in reversed(range(one.chunks))
                ]
            )
            for key in (key for key, one in found.items() if not one.chunks):
                await self._delete((await self.ledger.chunks_from(key, 0))[::-1])

    async def _store(
        self,
        pieces: Sequence[PendingChunk],
        points: Sequence[Stored],
        complete: Collection[PendingDocument],
    ) -> None:
        """Store points, except those of the batch's last document if it is stored already and more chunks follow."""
        if self._held.pending in complete:
            for part in self._held.parts():
                await self._send(part)
            self._held.clear()
        going = [
            (piece.pending, point)
            for piece, point in zip(pieces, points, strict=True)
            if not piece.pending.failed
        ]
        if waiting := [
            point for pending, point in going if pending.stored and pending not in complete
        ]:
            await asyncio.to_thread(self._held.add, going[-1][0], waiting)
        await self._send(
            [point for pending, point in going if not pending.stored or pending in complete]
        )

    async def _send(self, points: Sequence[Stored]) -> None:
        if points:
            await retry_unavailable(
                lambda: self.ledger.store.upsert(self.ledger.name, points), self.patience_s
            )

    def _fail(self, piece: PendingChunk, reason: str) -> None:
        """Put the document into quarantine, once, and drop its chunks."""
        if piece.pending.failed:
            return
        piece.pending.failed = True
        if self._held.pending is piece.pending:
            self._held.clear()
        document = piece.pending.document
        location = f"{document.location}, chunk {piece.chunk.number}"
        self.preparation.quarantine.add(
            Rejection(document.source, location, reason, piece.chunk.text, document.document_id)
        )

    async def _delete_stale(self, complete: Iterable[PendingDocument]) -> None:
        """Delete the surplus chunks of longer stored versions."""
        following = {
            point_id(one.document.key, one.chunks): one for one in complete if self.ledger.count
        }
        for name in await self.ledger.present(list(following)):
            await self._delete(
                await self.ledger.chunks_from(following[name].document.key, following[name].chunks)
            )

    async def _delete_failed(self, batch: Batch) -> None:
        """Delete all chunks of documents that failed in this batch or before, unless an old version is stored."""
        failed = dict.fromkeys(
            piece.pending
            for piece in batch.pieces
            if piece.pending.failed and not piece.pending.stored
        )
        await self._delete(
            [point_id(one.document.key, number) for one in failed for number in range(one.chunks)]
        )

    async def _delete(self, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), IDS_AT_ONCE):
            part = ids[start : start + IDS_AT_ONCE]
            await retry_unavailable(
                partial(self.ledger.store.delete, self.ledger.name, part), self.patience_s
            )

    def _note(self, batch: Batch, complete: Collection[PendingDocument]) -> None:
        preparation, stats = self.preparation, self.preparation.stats
        for file, documents in batch.files:
            if not preparation.quarantine.of(file.label):
                preparation.cache.put(file, preparation.settings, documents)
        stats.documents += len(complete)
        stats.chunks += sum(one.chunks for one in complete)
        stats.tokens += sum(one.tokens for one in complete)

    def _stop_if_most_fail(self, reasons: Sequence[str | None]) -> None:
        for reason in reasons:
            self._recent.append(reason is not None)
            failed = sum(self._recent)
            if len(self._recent) == RECENT_TEXTS and failed > RECENT_TEXTS // 2:
                last = next(one for one in reversed(reasons) if one is not None)
                raise BackendError(
                    f"{failed} of the last {RECENT_TEXTS} texts failed, so the ingest stops: {last}"
                )

    def _checked_points(
        self, pieces: Sequence[PendingChunk], embeddings: Embeddings
    ) -> tuple[list[Stored], list[str | None]]:
        """The points of the pieces, and for each piece InvalidPoint's message or None."""
        if not pieces:
            return [], []
        ids = [point_id(piece.pending.document.key, piece.chunk.number) for piece in pieces]
        payloads = [
            payload_of(
                one.pending.document,
                one.chunk,
                one.pending.chunks,
                one.pending.digest,
                self.preparation.settings,
            )
            for one in pieces
        ]
        objections: list[str | None] = []
        for point in (points := to_points(embeddings, ids, payloads)):
            try:
                check_points([point], self.schema)
                objections.append(None)
            except InvalidPoint as error:
                objections.append(str(error))
        return points, objections


THRESHOLD = (
    "ingest_indexing_threshold"  # key of a collection's metadata: the threshold in kB to restore
)
DEFAULT_THRESHOLD = 10_000  # kB, Qdrant's own
NEVER = 0
POLL_S, STALLED_S = 0.5, 600.0
Tell = Callable[[str], None]


@asynccontextmanager
async def deferred_indexing(store: Any, name: str, *, is_large: bool) -> AsyncIterator[None]:
    """A context without indexing, if the run `is_large`. Restores the saved threshold at its end."""
    if store.kind != "server":
        yield
        return
    if is_large:
        await _defer(store, name)
    try:
        yield
    finally:
        try:
            await _restore(store, name)
        except StoreError as error:
            log.warning(
                "collection %r: the next ingest restores its indexing threshold; this one could not: %s",
                name,
                error,
            )


async def _defer(server: Any, name: str) -> None:
    config = (await server.info(name)).config
    threshold = config.optimizer_config.indexing_threshold
    if (config.metadata or {}).get(THRESHOLD) is None:
        if threshold == NEVER:
            return  # the user's own choice
        await server.annotate(
            name, {THRESHOLD: DEFAULT_THRESHOLD if threshold is None else threshold}
        )
    await server.set_indexing_threshold(name, NEVER)


async def _restore(server: Any, name: str) -> None:
    schema = await server.describe(name)
    threshold = None if schema is None else schema.metadata.get(THRESHOLD)
    if threshold is None:
        return
    is_valid = isinstance(threshold, int) and not isinstance(threshold, bool) and threshold > 0
    await server.set_indexing_threshold(name, threshold if is_valid else DEFAULT_THRESHOLD)
    await server.annotate(name, {THRESHOLD: None})


async def wait_indexed(
    server: Any,
    name: str,
    stop: asyncio.Event,
    tell: Tell,
    *,
    quiet: bool = True,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
) -> None:
    """Show progress until the server has indexed the collection, `stop` is set, or nothing has changed for `STALLED_S`. The
    server continues to index in any case.
    """
    from tqdm.auto import tqdm

    last, since_s = -1, clock()
    with tqdm(disable=quiet, desc="indexing", unit=" vectors", mininterval=0.5) as bar:
        while True:
            info = await server.info(name)
            indexed = info.indexed_vectors_count or 0
            bar.update(max(0, indexed - bar.n))
            if info.status in ("green", "red"):
                tell(f"indexed   {indexed:,} vectors, the collection is {info.status.value}")
                return
            if indexed != last:
                last, since_s = indexed, clock()
            if stop.is_set() or clock() - since_s > STALLED_S:
                tell(
                    f"the server continues indexing: {indexed:,} vectors so far, the collection is {info.status.value}"
                )
                return
            try:
                await asyncio.wait_for(stop.wait(), poll_s)
            except TimeoutError:
                continue
