"""Turns sources into batches of chunks for the encoder: reads, compares with the stored documents, cuts, counts. Runs in a
thread.

A batch has a few hundred chunks, since the encoder groups chunks of similar lengths, and few enough tokens that a kill loses
only seconds of work. Independent of store and encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from hybridtei.retrieval.ingest.chunking import Chunk, Chunker, Document, Rejection, document_key
from hybridtei.retrieval.ingest.files import Quarantine, SourceFile, documents_of
from hybridtei.retrieval.ingest.ledger import MAX_DOCUMENTS, Documents, FileCache, Ledger, Source
from hybridtei.retrieval.ingest.options import IngestOptions, IngestStats

BATCH_CHUNKS = 256
BATCH_TOKENS = 16_384
GROUP_DOCUMENTS, GROUP_CHARACTERS = (
    1000,
    500_000,
)  # documents compared and cut at a time, by several threads


@dataclass(slots=True, eq=False)
class PendingDocument:
    """A document between reader and store. `failed`: it is in quarantine, and its other chunks are dropped. `stored`: the
    collection has a version of it."""

    document: Document
    digest: str
    chunks: int = 0
    tokens: int = 0
    stored: bool = False
    failed: bool = False


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
    """Chunks to embed together. `files`: the files that end in this batch, with their documents' ids and digests. `done_bytes`:
    of the whole source, once this batch is stored."""

    pieces: list[PendingChunk] = field(default_factory=list)
    files: list[tuple[SourceFile, Documents]] = field(default_factory=list)
    done_bytes: int = 0
    tokens: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.pieces) >= BATCH_CHUNKS or self.tokens >= BATCH_TOKENS


@dataclass(slots=True)
class Preparation:
    """The files of an ingest, and the settings for reading them. `settings`: a hash that differs whenever chunks differ.
    `first_settings`: the key of digests in collections of 0.1.

    `stored`: keys of the source's stored documents, by the label of their file. `unchanged`: labels of unchanged files, from
    `find_unchanged`. `missing`: keys of stored documents that their files no longer have.
    """

    files: Sequence[SourceFile]
    options: IngestOptions
    chunker: Chunker
    quarantine: Quarantine
    settings: str
    first_settings: bytes
    source: Source
    ledger: Ledger
    cache: FileCache
    stats: IngestStats = field(default_factory=IngestStats)
    stored: Mapping[str, Set[str]] = field(default_factory=dict)
    unchanged: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)

    def find_unchanged(self) -> None:
        """Find the files whose documents, by the cache, equal the stored ones."""
        if self.options.reread:
            return
        cached = {
            file.label: documents
            for file in self.files
            if file.label in self.stored
            and (documents := self.cache.get(file, self.settings)) is not None
        }
        known = {
            document_key(label, name): digest
            for label, documents in cached.items()
            for name, digest in documents
        }
        same = {
            key
            for key, one in self.ledger.lookup(list(known)).items()
            if one.is_version(known[key], self.settings)
        }
        for label, documents in cached.items():
            keys = {document_key(label, name) for name, _ in documents}
            if keys <= same:
                self.unchanged.add(label)
                self.stats.unchanged += len(keys)
                self.missing.extend(self.stored[label] - keys)

    def batches(self) -> Iterator[Batch]:
        """Yield full batches, and a last smaller one, in the order of the source."""
        batch, before = Batch(), 0
        for file in self.files:
            if file.label in self.unchanged:
                before += file.size
                continue
            self.stats.files += 1
            documents: list[tuple[str, str]] = []
            for group, read_bytes in self._groups(file, documents):
                for pieces in self._cut(group):
                    for piece in pieces:
                        batch.pieces.append(piece)
                        batch.tokens += piece.chunk.tokens
                        if batch.is_full:
                            yield batch
                            batch = Batch(done_bytes=batch.done_bytes)
                batch.done_bytes = before + read_bytes
            before += file.size
            batch.done_bytes = before
            batch.files.append((file, documents))
        if batch.pieces or batch.files:
            yield batch

    def _groups(
        self, file: SourceFile, documents: list[tuple[str, str]]
    ) -> Iterator[tuple[list[PendingDocument], int]]:
        """Yield (documents to store, bytes of the file read), a group at a time. Fills `documents` with (id, digest) of all."""
        stored = self.stored.get(file.label, frozenset())
        seen: dict[str, bool] = {}  # id -> True for a document, False for a rejection
        group: list[Document] = []
        characters = read_bytes = nameless = 0
        for found, read_bytes in documents_of(file, self.options):
            if isinstance(found, Rejection):
                self.quarantine.add(found)
                nameless += found.document_id is None
                if found.document_id is not None:
                    seen.setdefault(found.document_id, False)
                continue
            if seen.get(found.document_id):
                self._reject(
                    found,
                    f"the id {found.document_id!r} was there before: the first of that name is kept",
                )
                continue
            seen[found.document_id] = True
            group.append(found)
            characters += len(found.text)
            if len(group) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
                yield self._changed(group, stored, documents), read_bytes
                group, characters = [], 0
        yield self._changed(group, stored, documents), read_bytes
        missing = stored - {document_key(file.label, name) for name in seen}
        if nameless:
            self.stats.documents_unclear += len(missing)
        else:
            self.missing.extend(missing)

    def _changed(
        self, group: Sequence[Document], stored: Set[str], documents: list[tuple[str, str]]
    ) -> list[PendingDocument]:
        """The documents of a group whose current version is not stored."""
        there = self.ledger.lookup([one.key for one in group if one.key in stored])
        changed: list[PendingDocument] = []
        for document in group:
            digest, found = document.digest(), there.get(document.key)
            if (
                found is not None
                and found.settings is None
                and found.is_version(first := document.digest(self.first_settings), "")
            ):
                digest = first
            if len(documents) <= MAX_DOCUMENTS:
                documents.append((document.document_id, digest))
            if found is not None and found.is_version(digest, self.settings):
                self.stats.unchanged += 1
            else:
                changed.append(PendingDocument(document, digest, stored=found is not None))
        return changed

    def _reject(self, document: Document, reason: str) -> None:
        self.quarantine.add(
            Rejection(
                document.source, document.location, reason, document.text, document.document_id
            )
        )

    def _cut(self, group: Sequence[PendingDocument]) -> Iterator[list[PendingChunk]]:
        for pending, chunks in zip(
            group, self.chunker.chunks_of([one.document.indexed_text for one in group]), strict=True
        ):
            pending.chunks, pending.tokens = len(chunks), sum(chunk.tokens for chunk in chunks)
            if all(chunk.tokens <= self.chunker.around for chunk in chunks):
                self._reject(pending.document, "the tokenizer makes no token of its text")
                continue
            yield [PendingChunk(pending, chunk) for chunk in chunks]
