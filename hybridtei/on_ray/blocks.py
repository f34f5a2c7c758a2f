"""What travels between the processes of an ingest: batches of chunks as MessagePack, vectors as frames; never pickles of ours.

A document's text stays behind: only its chunks are stored. The surprise: a document may span batches, and a failure in one
must stop the others, so the receiver gives all pieces of a document one and the same `Pending` again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from hybridtei.engine import channel as frames
from hybridtei.ingest.chunking import Chunk, Document, Rejected
from hybridtei.ingest.prepare import Batch, Pending, Piece
from hybridtei.ingest.sources.walk import SourceFile
from hybridtei.outputs import Embeddings

Vectors = tuple[Embeddings, list[str | None]]


class SentDocument(msgspec.Struct, frozen=True):
    """A `Pending`, its text left out."""

    document: Document
    digest: bytes
    chunks: int


class Sent(msgspec.Struct, frozen=True):
    """A `Batch`, and what was found on the way to it: `rejected`, and how many documents were `skipped` as unchanged.

    `pieces`: (place in `documents`, chunk). `files`: (place among the reader's files, documents). `missing`, `unclear`: as in
    `Preparation` and `Tally`, found since the batch before. `is_last`: of its reader.
    """

    documents: list[SentDocument]
    pieces: list[tuple[int, Chunk]]
    files: list[tuple[int, int]]
    done_bytes: int
    rejected: list[Rejected]
    skipped: int
    files_begun: int
    missing: list[str]
    unclear: int
    is_last: bool

    @property
    def texts(self) -> list[str]:
        """To embed."""
        return [chunk.text for _, chunk in self.pieces]


def sent(
    batch: Batch,
    files: Sequence[SourceFile],
    rejected: list[Rejected],
    *,
    skipped: int,
    files_begun: int,
    missing: list[str],
    unclear: int,
    is_last: bool,
) -> Sent:
    """The batch as it travels."""
    unique = dict.fromkeys(piece.pending for piece in batch.pieces)
    places = {pending: place for place, pending in enumerate(unique)}
    return Sent(
        documents=[SentDocument(replace(one.document, text=""), one.digest, one.chunks) for one in unique],
        pieces=[(places[piece.pending], piece.chunk) for piece in batch.pieces],
        files=[(files.index(file), documents) for file, documents in batch.files],
        done_bytes=batch.done_bytes,
        rejected=rejected,
        skipped=skipped,
        files_begun=files_begun,
        missing=missing,
        unclear=unclear,
        is_last=is_last,
    )


class Receiver:
    """Batches of one reader, as they were; to be given them in order."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._open: dict[str, Pending] = {}  # documents of which more is to come

    def batch(self, given: Sent) -> Batch:
        """The pieces share a `Pending` where they are of one document, in earlier batches too."""
        pending = [self._pending(one) for one in given.documents]
        pieces = [Piece(pending[place], chunk) for place, chunk in given.pieces]
        for piece in pieces:
            if piece.is_last:
                self._open.pop(piece.pending.document.key, None)
        files = [(self._files[place], documents) for place, documents in given.files]
        return Batch(pieces, files, given.done_bytes, sum(piece.chunk.tokens for piece in pieces))

    def _pending(self, one: SentDocument) -> Pending:
        return self._open.setdefault(one.document.key, Pending(one.document, one.digest, one.chunks))


def packed(given: Sent) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(given)


def unpacked(data: bytes) -> Sent:
    """Raises msgspec.ValidationError for bytes that are none of ours."""
    return _DECODER.decode(data)


def packed_vectors(vectors: Vectors) -> bytes:
    """Rows, and for each text why it has none, or None."""
    return b"".join(frames.encode(vectors))


def unpacked_vectors(data: bytes) -> Vectors:
    """Arrays are views of the bytes."""
    embeddings, reasons = frames.decode(data)
    return embeddings, reasons


_DECODER = msgspec.msgpack.Decoder(Sent)
