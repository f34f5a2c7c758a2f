"""Embedded chunks into a collection, and into the ledger once the store has them: all that an ingest changes in a store.

A document is there whole or not at all: one with a chunk that cannot be embedded or stored goes into quarantine, and its other
chunks go from the collection. Chunks that an earlier, longer version had are deleted before the new ones are written; a kill in
between leaves the ledger's old entry, so the document is done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from qdrant_client import models

from hybridtei.errors import InvalidPoint
from hybridtei.outputs import Embeddings
from hybridtei.qdrant.documents import CHUNKS, Rejected, payload_of
from hybridtei.qdrant.ledger import Ledger
from hybridtei.qdrant.points import checked, point_id, to_points
from hybridtei.qdrant.preparing import Batch, Pending, Piece
from hybridtei.qdrant.progress import Tally
from hybridtei.qdrant.quarantine import Quarantine
from hybridtei.qdrant.retry import patiently
from hybridtei.qdrant.sources.limits import excerpt
from hybridtei.qdrant.store import CollectionPlan, Store

IDS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Writer:
    """`strangers`: the collection holds points that the ledger does not know, so documents new to it may be there already.
    `patience_s`: how long a change is tried again where the store does not do so itself."""

    store: Store
    name: str
    plan: CollectionPlan
    ledger: Ledger
    quarantine: Quarantine
    settings: bytes
    tally: Tally
    strangers: bool
    patience_s: float = 0.0

    async def write(self, batch: Batch, embeddings: Embeddings, reasons: Sequence[str | None]) -> None:
        """All of a batch is stored and noted when this returns. `embeddings`: a row for each piece without a reason against it.

        Raises StoreError; then nothing of the batch is noted, whatever of it is stored.
        """
        for piece, reason in zip(batch.pieces, reasons, strict=True):
            if reason is not None:
                self._fail(piece, reason)
        await self._delete_stale(batch)
        kept = [piece for piece, reason in zip(batch.pieces, reasons, strict=True) if reason is None]
        points = await asyncio.to_thread(_points, kept, embeddings)
        stored = await self._upsert(kept, points)
        await self._delete_failed(batch)
        await asyncio.to_thread(self._note, batch, stored)

    async def _upsert(self, pieces: list[Piece], points: list[models.PointStruct]) -> list[Piece]:
        """Those that were stored: of documents without a bad point."""
        chosen = [i for i, piece in enumerate(pieces) if not piece.pending.failed]
        try:
            await self._send([points[i] for i in chosen])
        except InvalidPoint:
            for i in chosen:
                try:
                    checked([points[i]], self.plan)
                except InvalidPoint as error:
                    self._fail(pieces[i], str(error))
            chosen = [i for i in chosen if not pieces[i].pending.failed]
            await self._send([points[i] for i in chosen])
        return [pieces[i] for i in chosen]

    async def _send(self, points: Sequence[models.PointStruct]) -> None:
        if points:
            await patiently(lambda: self.store.upsert(self.name, points), self.patience_s)

    def _fail(self, piece: Piece, reason: str) -> None:
        """The document is not wanted any more."""
        if piece.pending.failed:
            return
        piece.pending.failed = True
        document = piece.pending.document
        location = f"{document.location}, chunk {piece.chunk.number}"
        self.quarantine.add(Rejected(document.source, location, reason, excerpt(piece.chunk.text)))

    async def _delete_stale(self, batch: Batch) -> None:
        """Chunks that the documents beginning in this batch had once, and have no more."""
        begun = [piece.pending for piece in batch.pieces if piece.chunk.number == 0]
        before = {pending.document.key: self._known(pending) for pending in begun}
        asked = [pending for pending in begun if self.strangers and not before[pending.document.key]]
        for start in range(0, len(asked), IDS_AT_ONCE):
            ids = {point_id(one.document.key, 0): one.document.key for one in asked[start : start + IDS_AT_ONCE]}
            for record in await self.store.retrieve(self.name, list(ids)):
                before[ids[str(record.id)]] = int((record.payload or {}).get(CHUNKS, 0))
        await self._delete(
            [
                point_id(pending.document.key, number)
                for pending in begun
                for number in range(pending.chunks, before[pending.document.key])
            ]
        )

    async def _delete_failed(self, batch: Batch) -> None:
        """Every chunk of documents that failed in this batch or before."""
        failed = list(dict.fromkeys(piece.pending for piece in batch.pieces if piece.pending.failed))
        await self._delete(
            [
                point_id(pending.document.key, number)
                for pending in failed
                for number in range(max(pending.chunks, self._known(pending)))
            ]
        )
        known = [pending.document.key for pending in failed if self._known(pending)]
        if known:
            await asyncio.to_thread(self.ledger.remove, known)

    async def _delete(self, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), IDS_AT_ONCE):
            part = ids[start : start + IDS_AT_ONCE]
            await patiently(partial(self.store.delete, self.name, part), self.patience_s)
        self.tally.removed_chunks += len(ids)

    def _known(self, pending: Pending) -> int:
        stored = self.ledger.get(pending.document.key)
        return 0 if stored is None else stored.chunks

    def _note(self, batch: Batch, stored: Sequence[Piece]) -> None:
        whole = [piece.pending for piece in stored if piece.is_last and not piece.pending.failed]
        self.ledger.add([(one.document.key, one.digest, one.chunks) for one in whole])
        clean = [(file, documents) for file, documents in batch.files if not self.quarantine.of(file.label)]
        self.ledger.finish(clean, self.settings)
        self.tally.documents += len(whole)
        self.tally.chunks += len(stored)
        self.tally.tokens += sum(piece.chunk.tokens for piece in stored)


def _points(pieces: Sequence[Piece], embeddings: Embeddings) -> list[models.PointStruct]:
    if not pieces:
        return []
    ids = [point_id(piece.pending.document.key, piece.chunk.number) for piece in pieces]
    payloads = [payload_of(piece.pending.document, piece.chunk, piece.pending.chunks) for piece in pieces]
    return to_points(embeddings, ids, payloads)


async def lay_out(store: Store, name: str, plan: CollectionPlan) -> CollectionPlan | None:
    """The collection as it is; made by this plan, and None, if there was none. Does not check whether it fits."""
    existing = await store.describe(name)
    if existing is None:
        await store.create(name, plan)
    return existing


async def missing_documents(store: Store, name: str, ledger: Ledger, *, sample: int | None = None) -> list[str]:
    """Keys of documents that the ledger knows and the collection does not hold whole; `sample`: look at about so many only."""
    wanted = list(ledger.items())
    if sample is not None and len(wanted) > sample:
        wanted = [wanted[i] for i in np.linspace(0, len(wanted) - 1, sample, dtype=int)]
    keys: list[str] = []
    ids: list[str] = []
    missing: dict[str, None] = {}
    for place, (key, chunks) in enumerate(wanted):
        ids += [point_id(key, number) for number in range(chunks)]
        keys += [key] * chunks
        if len(ids) >= IDS_AT_ONCE or place == len(wanted) - 1:
            found = {str(record.id) for record in await store.retrieve(name, ids, with_payload=False)}
            missing |= dict.fromkeys(key for key, one in zip(keys, ids, strict=True) if one not in found)
            keys, ids = [], []
    return list(missing)
