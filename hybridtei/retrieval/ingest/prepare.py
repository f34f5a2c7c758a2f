"""Turns sources into batches of chunks for the encoder: reads, compares with the stored documents,
cuts, counts. Runs in a thread.

A batch has a few hundred chunks, since the encoder groups chunks of similar lengths, and few enough
tokens that a kill loses only seconds of work. Independent of store and encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import orjson

from hybridtei.retrieval.ingest.chunking import (
    CHUNK,
    CHUNKS,
    CONTEXT,
    DIGEST,
    DOCUMENT_ID,
    FILE,
    METADATA,
    PAGE,
    SETTINGS,
    SOURCE,
    START,
    TEXT,
    TITLE,
    Chunk,
    Chunker,
)
from hybridtei.retrieval.ingest.document import Document, Rejection
from hybridtei.retrieval.ingest.files import Quarantine, SourceFile, documents_of
from hybridtei.retrieval.ingest.ledger import Source, StoredDocuments, StoredVersion
from hybridtei.retrieval.ingest.options import IngestOptions, IngestStats
from hybridtei.retrieval.ingest.reader import Reader
from hybridtei.retrieval.store.base import PointId
from hybridtei.retrieval.store.points import point_id

BATCH_CHUNKS = 256
BATCH_TOKENS = 16_384
# From this share of unknown tokens on, a document is told.
MOST_UNKNOWN = 0.05
# Documents compared and cut at a time, by several threads
GROUP_DOCUMENTS, GROUP_CHARACTERS = (1000, 500_000)


@dataclass(slots=True, eq=False)
class PendingDocument:
    """A document between reader and store. `file`: size and times of a file that is one document.
    `stored`: its versions in the collection. `failed`: it is in quarantine, and its other chunks
    are dropped."""

    document: Document
    digest: str
    settings: str
    file: Sequence[int] | None
    stored: Sequence[StoredVersion] = ()
    chunks: int = 0
    tokens: int = 0
    failed: bool = False

    def point_id(self, number: int) -> str:
        """The id of a chunk's point."""
        document = self.document
        version = [document.source, document.document_id, self.digest, self.settings]
        return point_id(orjson.dumps(version).decode(), number)

    def payload_of(self, chunk: Chunk) -> dict[str, Any]:
        """The payload of a chunk's point."""
        document = self.document
        payload: dict[str, Any] = {
            TEXT: chunk.text,
            DOCUMENT_ID: document.document_id,
            SOURCE: document.source,
            CHUNK: chunk.number,
            CHUNKS: self.chunks,
            START: chunk.start,
            DIGEST: self.digest,
            SETTINGS: self.settings,
        }
        if chunk.context:
            payload[CONTEXT] = chunk.context
        if (page := document.page_at(chunk.start)) is not None:
            payload[PAGE] = page
        if self.file is not None:
            payload[FILE] = self.file
        if document.title:
            payload[TITLE] = document.title
        if document.metadata:
            payload[METADATA] = dict(document.metadata)
        return payload

    @property
    def ids(self) -> list[str]:
        return [self.point_id(number) for number in range(self.chunks)]


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
    """Chunks to embed together. `done_bytes`: of the whole source, once this batch is stored."""

    pieces: list[PendingChunk] = field(default_factory=list)
    done_bytes: int = 0
    tokens: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.pieces) >= BATCH_CHUNKS or self.tokens >= BATCH_TOKENS


@dataclass(slots=True)
class Preparation:
    """The files of an ingest, and the settings for reading them. `settings`: a hash that differs
    whenever chunks differ.
    `earlier`: the hashes that earlier readings made of the same settings; what they stored stays
    unless it is reread.

    `stored`: the source's documents in the collection. `missing`: (label, id) of stored documents
    that their files no longer have. `leftovers`: ids of points that a stopped ingest left beside a
    complete version. `touched`: {id of a point: new size and times of its file}, for files whose
    content is unchanged.
    """

    files: Sequence[SourceFile]
    options: IngestOptions
    chunker: Chunker
    quarantine: Quarantine
    settings: str
    source: Source
    stored: StoredDocuments
    earlier: Sequence[str] = ()
    reader: Reader = field(default_factory=Reader)
    stats: IngestStats = field(default_factory=IngestStats)
    missing: list[tuple[str, str]] = field(default_factory=list)
    leftovers: list[PointId] = field(default_factory=list)
    touched: dict[PointId, Sequence[int]] = field(default_factory=dict)

    def batches(self) -> Iterator[Batch]:
        """Yield full batches, and a last smaller one, in the order of the source."""
        # `before`: the bytes of the files before this one
        batch, before = Batch(), 0
        for file in self.files:
            if self.reader.is_stopped:
                return
            if file.left_out is not None:
                self.quarantine.report.add("left out", file.left_out, file.label)
                continue
            if self._is_unchanged(file):
                self.stats.unchanged += 1
                before += file.size
                continue
            self.stats.files += 1
            for group, read_bytes in self._groups(file):
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
        if batch.pieces:
            yield batch

    def _is_unchanged(self, file: SourceFile) -> bool:
        """True if the file is one document, stored with these settings and with the file's size and
        times."""
        versions = list(chain.from_iterable(self.stored.get(file.label, {}).values()))
        if self.options.reread or len(versions) != 1:
            return False
        stored = versions[0]
        if stored.file != file.stamp or not stored.is_complete:
            return False
        is_earlier = stored.settings in self.earlier
        self.stats.of_earlier_reading += is_earlier
        return is_earlier or stored.settings == self.settings

    def _groups(self, file: SourceFile) -> Iterator[tuple[list[PendingDocument], int]]:
        """Yield (documents to store, bytes of the file read), a group at a time."""
        stored = self.stored.get(file.label, {})
        # Id -> True for a document, False for a rejection
        seen: dict[str, bool] = {}
        kinds: dict[str, str] = {}
        group: list[Document] = []
        characters = read_bytes = nameless = 0
        for part, read_bytes in documents_of(file, self.options, self.reader):
            if isinstance(part, Rejection):
                self.quarantine.add(part)
                nameless += part.document_id is None
                if part.document_id is not None:
                    seen.setdefault(part.document_id, False)
                continue
            kind, name = part.id_kind, part.document_id
            # 1 is not "1", and a record without an id takes the place of none
            if kinds.setdefault(name, kind) != kind:
                name = f"{name} ({kind})"
            document = replace(part, document_id=name)
            if seen.get(document.document_id):
                self._reject(
                    document,
                    f"the id {document.document_id!r} was there before: the first of that name is "
                    "kept",
                )
                continue
            seen[document.document_id] = True
            group.append(document)
            characters += len(document.text)
            if len(group) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
                yield self._changed(group, file), read_bytes
                group, characters = [], 0
        yield self._changed(group, file), read_bytes
        missing = [(file.label, name) for name in stored if name not in seen]
        # A rejected record without an id may be one of the missing documents
        if nameless:
            self.stats.documents_unclear += len(missing)
        else:
            self.missing.extend(missing)

    def _changed(self, group: Sequence[Document], file: SourceFile) -> list[PendingDocument]:
        """The documents of a group whose current version is not stored."""
        stored = self.stored.get(file.label, {})
        changed: list[PendingDocument] = []
        for document in group:
            digest = document.digest()
            # None: the file has many documents
            stamp = file.stamp if document.document_id == file.label else None
            versions = stored.get(document.document_id, [])
            current = self._current(document, digest, versions)
            if current is None:
                for note in document.notes:
                    self.quarantine.report.add("documents", note, document.document_id)
                changed.append(PendingDocument(document, digest, self.settings, stamp, versions))
                continue
            self.stats.unchanged += 1
            for version in versions:
                if version is not current:
                    self.leftovers.extend(version.numbers)
            if stamp is not None and current.file != stamp:
                self.touched.update(dict.fromkeys(current.numbers, stamp))
        return changed

    def _current(
        self, document: Document, digest: str, versions: Sequence[StoredVersion]
    ) -> StoredVersion | None:
        """The stored version with the document's content, of this reading or, unless it is reread,
        of an earlier one."""
        for version in versions:
            if version.is_version(digest, self.settings):
                return version
        if self.options.reread:
            return None
        for version in versions:
            has_content = version.digest in (digest, document.earlier_digest())
            if has_content and version.settings in self.earlier and version.is_complete:
                self.stats.of_earlier_reading += 1
                return version
        return None

    def _reject(self, document: Document, reason: str) -> None:
        self.quarantine.add(
            Rejection(
                document.source, document.location, reason, document.text, document.document_id
            )
        )

    def _cut(self, group: Sequence[PendingDocument]) -> Iterator[list[PendingChunk]]:
        """Yield each document's chunks. A document without tokens is rejected."""
        cuts = self.chunker.chunks_of([pending.document for pending in group])
        for pending, chunks in zip(group, cuts, strict=True):
            pending.chunks = len(chunks)
            pending.tokens = sum(chunk.tokens for chunk in chunks)
            if all(chunk.tokens <= self.chunker.around for chunk in chunks):
                self._reject(pending.document, "the tokenizer makes no token of its text")
                continue
            share = self.chunker.unknown_share(pending.document.text)
            if share >= MOST_UNKNOWN:
                note = (
                    f"the model cannot read {share:.0%} of its tokens: a multilingual model, such "
                    "as --model-id BAAI/bge-m3, can"
                )
                self.quarantine.report.add("documents", note, pending.document.document_id)
            yield [PendingChunk(pending, chunk) for chunk in chunks]
