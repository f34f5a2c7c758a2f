"""What a document is before it is vectors, and what of it stands in a point's payload: the one place that names the keys.

A point is one chunk of one document:

    id            uuid5 of the document's key and the chunk's number (`points.point_id(document_key(...), chunk)`)
    text          what was embedded: the chunk, the title above it where it is the document's first
    document_id   the document's own name: its id in the data, or else its file's label
    source        label of the file it came from, `/` between the parts: "cranfield/corpus.jsonl"
    chunk         number of the chunk, from 0
    chunks        how many chunks the document has
    start         where the chunk begins in the document's indexed text, in characters
    title         only where the document has one
    metadata      every other field of the record, as it stood there: filters say `metadata.year`; only where there is any

The indexed text of a document is its title, a line feed, then its text. Two documents are the same if source and id are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

TEXT, DOCUMENT_ID, SOURCE, CHUNK, CHUNKS, START, TITLE, METADATA = (
    *("text", "document_id", "source", "chunk", "chunks", "start", "title", "metadata"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One document as a reader found it; `location` says where in the source, for people."""

    source: str
    document_id: str
    text: str
    title: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""

    @property
    def key(self) -> str:
        """What the ids of its points are made of."""
        return document_key(self.source, self.document_id)

    @property
    def indexed_text(self) -> str:
        """Title and text, as one."""
        return f"{self.title}\n{self.text}".strip() if self.title else self.text.strip()

    def digest(self, settings: bytes) -> bytes:
        """16 bytes that change whenever what would be stored does; `settings`: of model and chunking."""
        content = orjson.dumps([self.title, self.text, dict(self.metadata)], option=orjson.OPT_SORT_KEYS)
        return blake2b(content, digest_size=16, key=settings).digest()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something of a source that could not become a document, and why. `document_id`: of what it should have been, if known."""

    source: str
    location: str
    reason: str
    excerpt: str = ""
    document_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document; `tokens` as the model will read it, special tokens included."""

    number: int
    text: str
    start: int
    tokens: int


def document_key(source: str, document_id: str) -> str:
    """Source and id as one string, unlike that of any other pair."""
    return orjson.dumps([source, document_id]).decode()


def source_of(key: str) -> str:
    """The source that a document's key names."""
    source: str = orjson.loads(key)[0]
    return source


def payload_of(document: Document, chunk: Chunk, chunks: int) -> dict[str, Any]:
    """What is stored beside the vectors of a chunk."""
    payload: dict[str, Any] = {
        TEXT: chunk.text,
        DOCUMENT_ID: document.document_id,
        SOURCE: document.source,
        CHUNK: chunk.number,
        CHUNKS: chunks,
        START: chunk.start,
    }
    if document.title:
        payload[TITLE] = document.title
    if document.metadata:
        payload[METADATA] = dict(document.metadata)
    return payload
