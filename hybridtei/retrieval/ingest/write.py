"""Writes embedded chunks into a collection: every change of an ingest to a store.

Points of a new version have ids of their own. So they are written as they come, and the old
version's points are deleted after the last one: searches find the old version or the new one, and
for a moment both. A document with a chunk that cannot be embedded or stored goes into quarantine;
its new points are deleted, and its stored version stays.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridtei.errors import BackendError, InvalidPoint
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest.chunking import FILE
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.ledger import IDS_AT_ONCE
from hybridtei.retrieval.ingest.prepare import Batch, PendingChunk, PendingDocument, Preparation
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Store, Stored
from hybridtei.retrieval.store.plan import fit_to_schema
from hybridtei.retrieval.store.points import check_points, to_points
from hybridtei.system.retries import retry_unavailable

# If more than half of the last texts failed (this many), the engine is at fault, not the texts
RECENT_TEXTS = 50


@dataclass(frozen=True, slots=True)
class Writer:
    """`name`, `schema`: the collection's. `patience_s`: how long to retry a change, if the store
    does not retry itself."""

    store: Store
    name: str
    schema: CollectionSchema
    preparation: Preparation
    patience_s: float
    # True for each text that failed
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_TEXTS))

    async def write(
        self, batch: Batch, embeddings: Embeddings, reasons: Sequence[str | None]
    ) -> None:
        """Store a batch, and delete the old versions of documents that end in it.

        `embeddings`: a row for each piece without an error. Raises StoreError; then nothing of the
        batch is counted, even if some is stored. Raises BackendError, after storing the good
        pieces, if more than half of the last 50 texts failed.
        """
        accepted = [
            piece for piece, reason in zip(batch.pieces, reasons, strict=True) if reason is None
        ]
        embeddings = fit_to_schema(embeddings, self.schema)
        points, objections = await asyncio.to_thread(self._checked_points, accepted, embeddings)
        # Only pieces without a reason were checked
        remaining = iter(objections)
        reasons = [next(remaining) if reason is None else reason for reason in reasons]
        for piece, reason in zip(batch.pieces, reasons, strict=True):
            if reason is not None:
                self._fail(piece, reason)
        good = [
            point for piece, point in zip(accepted, points, strict=True) if not piece.pending.failed
        ]
        await self._upsert(good)
        await self._delete_failed(batch)
        complete = [
            piece.pending for piece in batch.pieces if piece.is_last and not piece.pending.failed
        ]
        await self._delete_replaced([pending for pending in complete if pending.stored])
        stats = self.preparation.stats
        stats.documents += len(complete)
        stats.chunks += sum(pending.chunks for pending in complete)
        stats.tokens += sum(pending.tokens for pending in complete)
        self._stop_if_most_fail(reasons)

    async def settle(self) -> None:
        """Delete what stopped ingests left beside complete versions, and store the new times of
        files that did not change."""
        await self._delete(self.preparation.leftovers)
        touched = self.preparation.touched
        for ids in parts_of(list(touched)):
            records = await self.store.retrieve(self.name, ids, with_vectors=True)
            points = [
                Stored(record.id, {**record.payload, FILE: touched[record.id]}, record.vector)
                for record in records
            ]
            await self._upsert(points)

    async def delete_documents(self, keys: Sequence[tuple[str, str]]) -> None:
        """Delete the documents of these labels and ids."""
        stored = self.preparation.stored
        await self._delete(
            [
                identity
                for label, document_id in keys
                for version in stored[label][document_id]
                for identity in version.numbers
            ]
        )

    def _fail(self, piece: PendingChunk, reason: str) -> None:
        """Put the document into quarantine, once, and drop its chunks."""
        if piece.pending.failed:
            return
        piece.pending.failed = True
        document = piece.pending.document
        location = f"{document.location}, chunk {piece.chunk.number}"
        self.preparation.quarantine.add(
            Rejection(document.source, location, reason, piece.chunk.text, document.document_id)
        )

    async def _delete_failed(self, batch: Batch) -> None:
        """Delete the chunks of documents that failed in this batch or before. A complete older
        version stays."""
        failed = dict.fromkeys(piece.pending for piece in batch.pieces if piece.pending.failed)
        for pending in failed:
            identities: list[PointId] = list(pending.ids)
            for version in pending.stored:
                if not version.is_complete:
                    identities += version.numbers
            await self._delete(identities)

    async def _delete_replaced(self, complete: Sequence[PendingDocument]) -> None:
        """Delete the other versions of documents. If another ingest has deleted a point of the new
        version, they stay."""
        new = {identity for pending in complete for identity in pending.ids}
        present: set[PointId] = set()
        for ids in parts_of(list(new)):
            records = await self.store.retrieve(self.name, ids, with_payload=False)
            present.update(record.id for record in records)
        await self._delete(
            [
                identity
                for pending in complete
                if present.issuperset(pending.ids)
                for version in pending.stored
                for identity in version.numbers
                if identity not in new
            ]
        )

    async def _upsert(self, points: Sequence[Stored]) -> None:
        if points:
            await retry_unavailable(lambda: self.store.upsert(self.name, points), self.patience_s)

    async def _delete(self, ids: Sequence[PointId]) -> None:
        for part in parts_of(ids):
            await retry_unavailable(partial(self.store.delete, self.name, part), self.patience_s)

    def _stop_if_most_fail(self, reasons: Sequence[str | None]) -> None:
        for reason in reasons:
            self._recent.append(reason is not None)
            failed = sum(self._recent)
            if len(self._recent) == RECENT_TEXTS and failed > RECENT_TEXTS // 2:
                last = next(cause for cause in reversed(reasons) if cause is not None)
                raise BackendError(
                    f"{failed} of the last {RECENT_TEXTS} texts failed, so the ingest stops: {last}"
                )

    def _checked_points(
        self, pieces: Sequence[PendingChunk], embeddings: Embeddings
    ) -> tuple[list[Stored], list[str | None]]:
        """The points of the pieces, and for each piece InvalidPoint's message or None."""
        if not pieces:
            return [], []
        ids = [piece.pending.point_id(piece.chunk.number) for piece in pieces]
        payloads = [piece.pending.payload_of(piece.chunk) for piece in pieces]
        objections: list[str | None] = []
        for point in (points := to_points(embeddings, ids, payloads)):
            try:
                check_points([point], self.schema)
                objections.append(None)
            except InvalidPoint as error:
                objections.append(str(error))
        return points, objections


def parts_of(ids: Sequence[PointId]) -> Iterator[Sequence[PointId]]:
    """The ids, `IDS_AT_ONCE` at a time."""
    return (ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE))


POLL_S, STALLED_S = 0.5, 600.0
Tell = Callable[[str], None]


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
    """Show progress until the server has indexed the collection, `stop` is set, or nothing has
    changed for `STALLED_S`. The server continues to index in any case.
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
                    f"the server continues indexing: {indexed:,} vectors so far, the collection is "
                    f"{info.status.value}"
                )
                return
            try:
                await asyncio.wait_for(stop.wait(), poll_s)
            except TimeoutError:
                continue
