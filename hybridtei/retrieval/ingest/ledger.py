"""What is stored. The collection is the ledger: its points say which documents it has, of which version.

A document is stored if all its chunks are there, with one digest, hash of settings and number of chunks; any other is done
again. Beside the collection lies a cache of the digests of files, which spares the reading of unchanged ones; a lost or broken
one is made again.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import msgspec
import orjson

from hybridtei.retrieval.ingest.chunking import CHUNK, CHUNKS, DIGEST, DOCUMENT_ID, SETTINGS, SOURCE, document_key
from hybridtei.retrieval.ingest.files import SourceFile
from hybridtei.retrieval.store.base import PointId, Store
from hybridtei.retrieval.store.points import point_id
from hybridtei.retrieval.store.query import Filter, Match

IDS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """What the points of a document say: `chunks` is 0 where some are missing, or are of several versions."""

    digest: Any
    settings: Any
    chunks: int

    def is_version(self, digest: str, settings: str) -> bool:
        """Whether it is whole, of this digest and of these settings; points of 0.1 have these in their digest."""
        return self.chunks > 0 and self.digest == digest and self.settings in (None, settings)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a collection has of documents, asked for a thousand points at a time. `count`: of its points, at the start."""

    store: Store
    name: str
    count: int

    async def keys_below(self, labels: Sequence[str]) -> dict[str, set[str]]:
        """{label of a file: keys of documents} of these sources."""
        first = Filter(must=[Filter(key=CHUNK, match=Match(value=0))])
        found: dict[str, set[str]] = {}
        offset: PointId | None = None
        while self.count:
            records, offset = await self.store.scroll(
                self.name, limit=IDS_AT_ONCE, offset=offset, scroll_filter=first, with_payload=(SOURCE, DOCUMENT_ID)
            )
            for record in records:
                label, name = (str(record.payload.get(field)) for field in (SOURCE, DOCUMENT_ID))
                if is_below(label, labels) and str(record.id) == point_id(key := document_key(label, name), 0):
                    found.setdefault(label, set()).add(key)
            if offset is None:
                break
        return found

    async def documents(self, keys: Iterable[str]) -> dict[str, StoredDocument]:
        """The documents of which the collection has the first chunk at least."""
        firsts = {key: version async for (key, _), version in self._versions((key, 0) for key in keys)}
        counts = {key: self._chunks(version) for key, version in firsts.items()}
        rest = ((key, number) for key, count in counts.items() for number in range(1, count))
        whole = Counter(firsts.keys())
        async for (key, _), version in self._versions(rest):
            whole[key] += version == firsts[key]
        return {
            key: StoredDocument(digest, settings, counts[key] if whole[key] == counts[key] else 0)
            for key, (digest, settings, _) in firsts.items()
        }

    def _chunks(self, version: Sequence[Any]) -> int:
        """The number of chunks that a payload claims; 0 for one that cannot be."""
        return version[2] if type(version[2]) is int and 0 < version[2] <= self.count else 0

    async def _versions(self, chunks: Iterable[tuple[str, int]]) -> AsyncIterator[tuple[tuple[str, int], tuple[Any, ...]]]:
        """((key, number), (digest, settings, claimed number of chunks)) of the chunks that are there."""
        remaining = iter(chunks)
        while part := {point_id(*chunk): chunk for chunk in islice(remaining, IDS_AT_ONCE)}:
            fields = (DIGEST, SETTINGS, CHUNKS)
            for record in await self.store.retrieve(self.name, list(part), with_payload=fields):
                yield part[str(record.id)], tuple(record.payload.get(field) for field in fields)

    async def present(self, ids: Sequence[str]) -> set[str]:
        """The ids that the collection has."""
        present: set[str] = set()
        for start in range(0, len(ids), IDS_AT_ONCE):
            part = ids[start : start + IDS_AT_ONCE]
            present |= {str(record.id) for record in await self.store.retrieve(self.name, part, with_payload=False)}
        return present

    async def chunks_from(self, key: str, first: int) -> list[str]:
        """Ids of a document's stored chunks from this number on, up to a gap."""
        found: list[str] = []
        while True:
            start = first + len(found)
            ids = [point_id(key, number) for number in range(start, start + IDS_AT_ONCE)]
            present = await self.present(ids)
            found += takewhile(present.__contains__, ids)
            if len(present) < len(ids):
                return found


def is_below(label: str, labels: Iterable[str]) -> bool:
    """Whether a file of this label belongs to one of the sources."""
    return any(label == one or label.startswith(f"{one}/") for one in labels)


MAX_DOCUMENTS = 100_000  # of a file: a larger one is read again rather than kept in memory
Documents = Sequence[tuple[str, str]]  # (id, digest)
_decode = msgspec.msgpack.Decoder(list[tuple[str, str]]).decode


class FileCache:
    """(id, digest) of the documents in each file, while the file's stamp, label and settings are the same."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open(path)
        except sqlite3.DatabaseError:
            path.unlink()
            self._open(path)

    def _open(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA synchronous = OFF")  # a power cut costs the cache, not a document
        self._database.execute("CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, version BLOB, documents BLOB)")

    def get(self, file: SourceFile, settings: str) -> Documents | None:
        """The documents of a file; None if it is new or changed, or was read with other settings."""
        try:
            query = "SELECT documents FROM files WHERE path = ? AND version = ?"
            row = self._database.execute(query, (os.fsencode(file.path), _version(file, settings))).fetchone()
            return None if row is None else _decode(row[0])
        except (sqlite3.DatabaseError, msgspec.DecodeError):
            return None

    def put(self, file: SourceFile, settings: str, documents: Documents) -> None:
        """Note the documents of a file that was read whole."""
        if len(documents) <= MAX_DOCUMENTS:
            row = (os.fsencode(file.path), _version(file, settings), msgspec.msgpack.encode(documents))
            self._database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", row)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _version(file: SourceFile, settings: str) -> bytes:
    return orjson.dumps([file.label, file.size, *file.stamp, settings])
