"""Sources as batches of chunks for the encoder: read, compared with the ledger, cut, counted. Runs in a thread of its own.

Batches are a few hundred chunks, because the encoder groups chunks of like lengths, and few enough tokens that a kill loses
seconds of work. Knows neither store nor encoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest

from hybridtei.ingest.chunking import Chunk, Chunker, Document, Rejection, document_key, source_of
from hybridtei.ingest.files import SourceFile, documents_of
from hybridtei.ingest.ledger import FinishedFile, Ledger, Quarantine
from hybridtei.ingest.options import IngestStats
from hybridtei.ingest.records import ReadOptions, excerpt

BATCH_CHUNKS = 256
BATCH_TOKENS = 16_384
GROUP_DOCUMENTS, GROUP_CHARACTERS = 128, 500_000  # cut at a time, by several threads


@dataclass(slots=True, eq=False)
class PendingDocument:
    """A document between reader and store. `failed`: it is in quarantine, and its other chunks are dropped. `stored`: the
    collection holds a version of it."""

    document: Document
    digest: bytes
    chunks: int
    failed: bool = False
    stored: bool = False


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk and its document."""

    pending: PendingDocument
    chunk: Chunk

    @property
    def is_last(self) -> bool:
        return self.chunk.number == self.pending.chunks - 1


@dataclass(slots=True)
class Batch:
    """Chunks to embed together. `files`: those that end in this batch, with their numbers of documents. `done_bytes`: of the
    whole source, once this batch is stored."""

    pieces: list[PendingChunk] = field(default_factory=list)
    files: list[tuple[SourceFile, int]] = field(default_factory=list)
    done_bytes: int = 0
    tokens: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.pieces) >= BATCH_CHUNKS or self.tokens >= BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class Preparation:
    """The files of an ingest, and how they are read. `settings`: at most 64 bytes that differ wherever vectors or chunks do.

    `label`: the source's, with which the labels of its files begin. `delete_missing`: stored documents that the source no
    longer holds are deleted, so files that lack some are read although they are unchanged. `missing`: keys of such documents,
    of the files that were read.
    """

    files: Sequence[SourceFile]
    options: ReadOptions
    chunker: Chunker
    ledger: Ledger
    quarantine: Quarantine
    settings: bytes
    stats: IngestStats
    label: str = ""
    delete_missing: bool = False
    missing: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """The sizes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def unread_bytes(self) -> int:
        """The sizes of the files that are to be read."""
        finished = self.finished_files()
        return sum(file.size for file in self.files if file.label not in finished)

    def batches(self) -> Iterator[Batch]:
        """Full batches, and a last one, in the order of the source."""
        batch, before = Batch(), 0
        finished = self.finished_files()
        unseen = self._stored_in({file.label for file in self.files if file.label not in finished})
        for file in self.files:
            entry = finished.get(file.label)
            if entry is not None:
                self.stats.skipped += entry.documents
                before += file.size
                continue
            self.stats.files += 1
            documents = -self.stats.skipped
            for group, read_bytes in self._groups(file, unseen.pop(file.label, set())):
                documents += len(group)
                for pieces in self._cut(group):
                    for piece, following in zip_longest(pieces, pieces[1:]):
                        batch.pieces.append(piece)
                        batch.tokens += piece.chunk.tokens
                        if batch.is_full and not _read_together(piece, following):
                            yield batch
                            batch = Batch(done_bytes=batch.done_bytes)
                batch.done_bytes = before + read_bytes
            before += file.size
            batch.done_bytes = before
            batch.files.append((file, documents + self.stats.skipped))
        if batch.pieces or batch.files:
            yield batch

    def finished_files(self) -> dict[str, FinishedFile]:
        """Unchanged files with every document stored, by label. Counts stored documents that they no longer hold."""
        stored = Counter(source_of(key) for key in self.ledger.stored_keys())
        finished: dict[str, FinishedFile] = {}
        self.stats.missing = 0
        for file in self.files:
            entry = self.ledger.finished(file, self.settings)
            missing = stored[file.label] - entry.documents if entry is not None else 0
            if entry is not None and not (missing and self.delete_missing):
                finished[file.label] = entry
                self.stats.missing += missing
        return finished

    def _stored_in(self, labels: Set[str]) -> dict[str, set[str]]:
        """Keys of the stored documents of these files, by label."""
        keys: dict[str, set[str]] = {}
        for key in self.ledger.stored_keys():
            if (label := source_of(key)) in labels:
                keys.setdefault(label, set()).add(key)
        return keys

    def _groups(self, file: SourceFile, unseen: set[str]) -> Iterator[tuple[list[PendingDocument], int]]:
        """(documents to store, bytes of the file that were read), a group at a time. `unseen`: keys of the file's stored
        documents; those that it no longer holds are noted."""
        seen: set[bytes] = set()
        group: list[PendingDocument] = []
        characters = unchanged = read_bytes = nameless = 0
        for document, read_bytes in documents_of(file, self.options):
            if document.document_id is None:
                nameless += 1
            else:
                unseen.discard(document_key(document.source, document.document_id))
            pending = self._pending(document, seen)
            if pending is not None:
                group.append(pending)
                characters += len(pending.document.text)
            else:
                unchanged += 1
            if len(group) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS or unchanged >= 10 * GROUP_DOCUMENTS:
                yield group, read_bytes
                group, characters, unchanged = [], 0, 0
        if nameless:
            self.stats.unclear += len(unseen)
        else:
            self.missing.extend(unseen)
        yield group, read_bytes

    def _pending(self, document: Document | Rejection, seen: set[bytes]) -> PendingDocument | None:
        if isinstance(document, Rejection):
            self.quarantine.add(document)
            return None
        name = blake2b(document.document_id.encode(), digest_size=16).digest()
        if name in seen:
            self._reject(document, f"the id {document.document_id!r} was there before: the first of that name is kept")
            return None
        seen.add(name)
        digest = document.digest(self.settings)
        stored = self.ledger.get(document.key)
        if stored is not None and stored.digest == digest:
            self.stats.skipped += 1
            return None
        return PendingDocument(document, digest, 0)

    def _reject(self, document: Document, reason: str) -> None:
        text = excerpt(document.text)
        self.quarantine.add(Rejection(document.source, document.location, reason, text, document.document_id))

    def _cut(self, group: Sequence[PendingDocument]) -> Iterator[list[PendingChunk]]:
        for pending, chunks in zip(group, self.chunker.chunks_of([one.document.indexed_text for one in group]), strict=True):
            pending.chunks = len(chunks)
            if all(chunk.tokens <= self.chunker.around for chunk in chunks):
                self._reject(pending.document, "its text becomes no token of the model's")
                continue
            yield [PendingChunk(pending, chunk) for chunk in chunks]


def _read_together(one: PendingChunk, following: PendingChunk | None) -> bool:
    """Whether two chunks of a document come from one pass, which two batches would each run."""
    return following is not None and one.chunk.window is not None and one.chunk.window == following.chunk.window
