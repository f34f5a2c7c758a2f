"""Sources become batches of chunks for the encoder: read, compared with the ledger, cut, counted. Runs in a thread of its own.

Batches are a few hundred chunks, because the encoder puts like lengths together within what it is given, and few enough tokens
that a kill loses seconds of work. Nothing here knows the store or the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from hybridtei.qdrant.chunking import Chunker
from hybridtei.qdrant.documents import Chunk, Document, Rejected
from hybridtei.qdrant.ledger import Ledger
from hybridtei.qdrant.progress import Tally
from hybridtei.qdrant.quarantine import Quarantine
from hybridtei.qdrant.sources.limits import ReadOptions, excerpt
from hybridtei.qdrant.sources.walk import SourceFile, documents_of

BATCH_CHUNKS = 256
BATCH_TOKENS = 16_384
GROUP_DOCUMENTS, GROUP_CHARACTERS = 128, 500_000  # cut at a time, by several threads


@dataclass(slots=True, eq=False)
class Pending:
    """A document on its way. `failed`: it is in quarantine, and what is left of it is not wanted any more."""

    document: Document
    digest: bytes
    chunks: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and whose it is."""

    pending: Pending
    chunk: Chunk

    @property
    def is_last(self) -> bool:
        return self.chunk.number == self.pending.chunks - 1


@dataclass(slots=True)
class Batch:
    """Chunks to embed together. `files`: those of which nothing is left to come, with their numbers of documents. `done_bytes`:
    of the whole source, once this is stored."""

    pieces: list[Piece] = field(default_factory=list)
    files: list[tuple[SourceFile, int]] = field(default_factory=list)
    done_bytes: int = 0
    tokens: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.pieces) >= BATCH_CHUNKS or self.tokens >= BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class Preparation:
    """What an ingest reads, and how. `settings`: bytes that differ wherever vectors or chunks would; at most 64."""

    files: Sequence[SourceFile]
    options: ReadOptions
    chunker: Chunker
    ledger: Ledger
    quarantine: Quarantine
    settings: bytes
    tally: Tally
    progress: Callable[[int], None] = lambda done_bytes: None

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def batches(self) -> Iterator[Batch]:
        """Full batches, and a last one; in the order of the source. Raises LoadError where a kind of file needs a library."""
        batch, before = Batch(), 0
        for file in self.files:
            known = self.ledger.finished(file, self.settings)
            if known is not None:
                self.tally.skipped += known.documents
                before += file.size
                continue
            self.tally.files += 1
            documents = -self.tally.skipped
            for group, read_bytes in self._groups(file):
                documents += len(group)
                for pieces in self._cut(group):
                    for piece in pieces:
                        batch.pieces.append(piece)
                        batch.tokens += piece.chunk.tokens
                        if batch.is_full:
                            yield batch
                            batch = Batch(done_bytes=batch.done_bytes)
                batch.done_bytes = before + read_bytes
                if not batch.pieces:
                    self.progress(batch.done_bytes)
            before += file.size
            batch.done_bytes = before
            batch.files.append((file, documents + self.tally.skipped))
        if batch.pieces or batch.files:
            yield batch

    def _groups(self, file: SourceFile) -> Iterator[tuple[list[Pending], int]]:
        """Documents that have to be stored, some at a time, and the bytes of the file behind them."""
        seen: set[bytes] = set()
        group: list[Pending] = []
        characters = unchanged = read_bytes = 0
        for found, read_bytes in documents_of(file, self.options):
            pending = self._pending(found, seen)
            if pending is not None:
                group.append(pending)
                characters += len(pending.document.text)
            else:
                unchanged += 1
            if len(group) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS or unchanged >= 10 * GROUP_DOCUMENTS:
                yield group, read_bytes
                group, characters, unchanged = [], 0, 0
        yield group, read_bytes

    def _pending(self, found: Document | Rejected, seen: set[bytes]) -> Pending | None:
        if isinstance(found, Rejected):
            self.quarantine.add(found)
            return None
        name = blake2b(found.document_id.encode(), digest_size=16).digest()
        if name in seen:
            reason = f"the id {found.document_id!r} was there before: the first of that name is kept"
            self.quarantine.add(Rejected(found.source, found.location, reason, excerpt(found.text)))
            return None
        seen.add(name)
        digest = found.digest(self.settings)
        stored = self.ledger.get(found.key)
        if stored is not None and stored.digest == digest:
            self.tally.skipped += 1
            return None
        return Pending(found, digest, 0)

    def _cut(self, group: Sequence[Pending]) -> Iterator[list[Piece]]:
        for pending, chunks in zip(group, self.chunker.chunks_of([one.document.indexed_text for one in group]), strict=True):
            pending.chunks = len(chunks)
            if all(chunk.tokens <= self.chunker.around for chunk in chunks):
                found = pending.document
                reason = "its text becomes no token of the model's"
                self.quarantine.add(Rejected(found.source, found.location, reason, excerpt(found.text)))
                continue
            yield [Piece(pending, chunk) for chunk in chunks]
