"""What travels between the processes of an ingest, and how a block is embedded again after its process died.

Batches of chunks travel as MessagePack and vectors as frames, never as pickles of ours. A document's text stays behind: only
its chunks are stored. A document may span batches, and a failure in one must stop the others, so the receiver gives all pieces
of a document the same `PendingDocument`.

Ray gives a dead actor's block to the next actor, which would die of it too. So a block is noted where it outlives the actor;
one that was begun twice and not ended is embedded text by text, and a text that was being embedded at a death goes into
quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import msgspec

from hybridtei.errors import BackendError
from hybridtei.ingest.chunking import Chunk, Document, Rejection
from hybridtei.ingest.embedders import embed_each
from hybridtei.ingest.files import SourceFile
from hybridtei.ingest.prepare import Batch, PendingChunk, PendingDocument
from hybridtei.outputs import Embeddings
from hybridtei.system import frames

Vectors = tuple[Embeddings, list[str | None]]


class DocumentMessage(msgspec.Struct, frozen=True):
    """A `PendingDocument` without its text."""

    document: Document
    digest: bytes
    chunks: int


class BatchMessage(msgspec.Struct, frozen=True):
    """A `Batch`, and what was found on the way to it: `rejected`, and how many documents were `skipped` as unchanged.

    `pieces`: (place in `documents`, chunk). `files`: (place among the reader's files, documents). `missing`, `unclear`: as in
    `Preparation` and `IngestStats`, found since the batch before. `is_last`: of its reader.
    """

    documents: list[DocumentMessage]
    pieces: list[tuple[int, Chunk]]
    files: list[tuple[int, int]]
    done_bytes: int
    rejected: list[Rejection]
    skipped: int
    files_begun: int
    missing: list[str]
    unclear: int
    is_last: bool

    @property
    def texts(self) -> list[str]:
        """The texts of the chunks, in order."""
        return [chunk.text for _, chunk in self.pieces]


def message_of(
    batch: Batch,
    files: Sequence[SourceFile],
    rejected: list[Rejection],
    *,
    skipped: int,
    files_begun: int,
    missing: list[str],
    unclear: int,
    is_last: bool,
) -> BatchMessage:
    """The batch as it travels."""
    unique = dict.fromkeys(piece.pending for piece in batch.pieces)
    places = {pending: place for place, pending in enumerate(unique)}
    return BatchMessage(
        documents=[DocumentMessage(replace(one.document, text=""), one.digest, one.chunks) for one in unique],
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
    """Batches of one reader, as they were; to be message them in order."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._open: dict[str, PendingDocument] = {}  # documents of which more is to come

    def batch(self, message: BatchMessage) -> Batch:
        """The pieces share a `PendingDocument` where they are of one document, in earlier batches too."""
        pending = [self._pending(one) for one in message.documents]
        pieces = [PendingChunk(pending[place], chunk) for place, chunk in message.pieces]
        for piece in pieces:
            if piece.is_last:
                self._open.pop(piece.pending.document.key, None)
        files = [(self._files[place], documents) for place, documents in message.files]
        return Batch(pieces, files, message.done_bytes, sum(piece.chunk.tokens for piece in pieces))

    def _pending(self, one: DocumentMessage) -> PendingDocument:
        return self._open.setdefault(one.document.key, PendingDocument(one.document, one.digest, one.chunks))


def encode_batch(message: BatchMessage) -> bytes:
    """A block as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode_batch(data: bytes) -> BatchMessage:
    """Raises msgspec.ValidationError for bytes that are none of ours."""
    return _DECODER.decode(data)


def encode_vectors(vectors: Vectors) -> bytes:
    """Rows, and for each text why it has none, or None."""
    return b"".join(frames.encode(vectors))


def decode_vectors(data: bytes) -> Vectors:
    """Arrays are views of the bytes."""
    embeddings, reasons = frames.decode(data)
    return embeddings, reasons


_DECODER = msgspec.msgpack.Decoder(BatchMessage)


WHOLE_TRIES = 2  # a death may have another cause than the texts
MAX_TRIES = 10  # of a block; at the last, nothing is embedded, so that it ends
FATAL = "the process that embedded it ended"
Block = tuple[int, int]  # reader and number


class Notes(Protocol):
    """What `embed_block` asks of `Attempts`, here or in an actor."""

    def begin(self, block: Block) -> tuple[int, list[int]]: ...

    def note(self, block: Block, place: int) -> None: ...

    def end(self, block: Block) -> None: ...


@dataclass
class _Begun:
    tries: int = 0
    in_hand: int | None = None
    fatal: set[int] = field(default_factory=set)


class Attempts:
    """Blocks that were begun and not ended."""

    def __init__(self) -> None:
        self._blocks: dict[Block, _Begun] = {}

    def begin(self, block: Block) -> tuple[int, list[int]]:
        """(how often it was begun, this time included; places of the texts in hand when it was not ended)."""
        begun = self._blocks.setdefault(block, _Begun())
        begun.tries += 1
        if begun.in_hand is not None:
            begun.fatal.add(begun.in_hand)
            begun.in_hand = None
        return begun.tries, sorted(begun.fatal)

    def note(self, block: Block, place: int) -> None:
        """This text is in hand now."""
        self._blocks[block].in_hand = place

    def end(self, block: Block) -> None:
        """Forgets a block, since it is embedded."""
        self._blocks.pop(block, None)


def embed_block(notes: Notes, block: Block, embed: Callable[[Sequence[str]], Embeddings], texts: Sequence[str]) -> Vectors:
    """Rows, and for each text why it has none, or None. Raises BackendError where no text of several could be embedded."""
    tries, fatal = notes.begin(block)
    if tries <= WHOLE_TRIES:
        vectors = embed_each(embed, texts)
    elif tries < MAX_TRIES:
        vectors = _one_by_one(notes, block, embed, texts, frozenset(fatal))
    else:
        vectors = Embeddings(), [f"{FATAL}, {tries - 1} times"] * len(texts)
    notes.end(block)
    return vectors


def _one_by_one(
    notes: Notes, block: Block, embed: Callable[[Sequence[str]], Embeddings], texts: Sequence[str], fatal: frozenset[int]
) -> Vectors:
    parts: list[Embeddings] = []
    reasons: list[str | None] = []
    for place, text in enumerate(texts):
        if place in fatal:
            reasons.append(FATAL)
            continue
        notes.note(block, place)
        part, (reason,) = embed_each(embed, [text])
        reasons.append(reason)
        if reason is None:
            parts.append(part)
    return Embeddings.concat(parts), reasons


T = TypeVar("T")


def in_order(arriving: Iterable[tuple[int, int, T]]) -> Generator[tuple[int, T]]:
    """(reader, number, block), numbers from 0 for each reader -> (reader, block) by number; a block that came before is left
    out. Raises BackendError at the end if one is missing."""
    following: dict[int, int] = {}
    waiting: dict[int, dict[int, T]] = {}
    for reader, number, block in arriving:
        held = waiting.setdefault(reader, {})
        if number >= following.setdefault(reader, 0):
            held.setdefault(number, block)
        while following[reader] in held:
            yield reader, held.pop(following[reader])
            following[reader] += 1
    missing = {reader: following[reader] for reader, held in waiting.items() if held}
    if missing:
        reader, number = next(iter(missing.items()))
        raise BackendError(f"Ray lost block {number} of reader {reader}: run the same command again to go on")
