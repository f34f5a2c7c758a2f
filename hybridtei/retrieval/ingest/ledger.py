"""The collection as the ledger of an ingest: its documents, its sources, and its writer.

A document is stored if all its chunks exist with the same digest, settings hash and number of chunks. Otherwise it is ingested
again. A cache of files' digests beside the collection avoids reading unchanged files; it is rebuilt if lost or broken.

A source is a resolved path with a name in the collection: the last part of the path, or `--source-name`. The metadata map names
to paths. A file or folder below a known path belongs to that source, so it can be refreshed alone. Collections of 0.1 have
names without paths: the first ingest of a path takes the name over.

Only one ingest at a time writes to a collection: in a folder by a file lock, on a server by a lease in the metadata, which the
holder renews. If a lease is not renewed for `LEASE_S`, its ingest has died. Clocks of machines are not compared.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import msgspec
import orjson

from hybridtei.errors import InvalidInput, StoreError
from hybridtei.retrieval.ingest.chunking import (
    CHUNK,
    CHUNKS,
    DIGEST,
    DOCUMENT_ID,
    SETTINGS,
    SOURCE,
    document_key,
)
from hybridtei.retrieval.ingest.files import SourceFile, printable
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Store
from hybridtei.retrieval.store.collection import check_fits
from hybridtei.retrieval.store.points import point_id
from hybridtei.retrieval.store.query import Filter, Match

IDS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """The state of a document's points. `chunks`: 0 if some are missing or from several versions."""

    digest: Any
    settings: Any
    chunks: int

    def is_version(self, digest: str, settings: str) -> bool:
        """True if it is complete, with this digest and these settings. Points of 0.1 have the settings in the digest."""
        return self.chunks > 0 and self.digest == digest and self.settings in (None, settings)


@dataclass(slots=True)
class Ledger:
    """The documents of a collection, read a thousand points at a time. `loop`: the store's. `count`: of points at the start of
    the ingest."""

    store: Store
    name: str
    loop: asyncio.AbstractEventLoop
    count: int = 0

    def lookup(self, keys: Sequence[str]) -> Mapping[str, StoredDocument]:
        """Like `documents`, for threads other than the loop's."""
        return (
            asyncio.run_coroutine_threadsafe(self.documents(keys), self.loop).result()
            if keys
            else {}
        )

    async def keys_below(self, labels: Sequence[str]) -> dict[str, set[str]]:
        """{label of a file: keys of documents} of these sources."""
        first = Filter(must=[Filter(key=CHUNK, match=Match(value=0))])
        found: dict[str, set[str]] = {}
        offset: PointId | None = None
        while self.count:
            records, offset = await self.store.scroll(
                self.name,
                limit=IDS_AT_ONCE,
                offset=offset,
                scroll_filter=first,
                with_payload=(SOURCE, DOCUMENT_ID),
            )
            for record in records:
                label, name = (str(record.payload.get(field)) for field in (SOURCE, DOCUMENT_ID))
                if is_below(label, labels) and str(record.id) == point_id(
                    key := document_key(label, name), 0
                ):
                    found.setdefault(label, set()).add(key)
            if offset is None:
                break
        return found

    async def documents(self, keys: Iterable[str]) -> dict[str, StoredDocument]:
        """The documents whose first chunk is in the collection."""
        firsts = {
            key: version async for (key, _), version in self._versions((key, 0) for key in keys)
        }
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
        """The number of chunks in a payload; 0 if it is impossible."""
        return version[2] if type(version[2]) is int and 0 < version[2] <= self.count else 0

    async def _versions(
        self, chunks: Iterable[tuple[str, int]]
    ) -> AsyncIterator[tuple[tuple[str, int], tuple[Any, ...]]]:
        """((key, number), (digest, settings, number of chunks)) of the stored chunks."""
        remaining = iter(chunks)
        while part := {point_id(*chunk): chunk for chunk in islice(remaining, IDS_AT_ONCE)}:
            fields = (DIGEST, SETTINGS, CHUNKS)
            for record in await self.store.retrieve(self.name, list(part), with_payload=fields):
                yield part[str(record.id)], tuple(record.payload.get(field) for field in fields)

    async def present(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that the collection has."""
        present: set[str] = set()
        for start in range(0, len(ids), IDS_AT_ONCE):
            part = ids[start : start + IDS_AT_ONCE]
            present |= {
                str(record.id)
                for record in await self.store.retrieve(self.name, part, with_payload=False)
            }
        return present

    async def chunks_from(self, key: str, first: int) -> list[str]:
        """The ids of a document's stored chunks from this number on, up to a gap."""
        found: list[str] = []
        while True:
            start = first + len(found)
            ids = [point_id(key, number) for number in range(start, start + IDS_AT_ONCE)]
            present = await self.present(ids)
            found += takewhile(present.__contains__, ids)
            if len(present) < len(ids):
                return found


def is_below(label: str, labels: Iterable[str]) -> bool:
    """True if a file with this label belongs to one of the sources."""
    return any(label == one or label.startswith(f"{one}/") for one in labels)


MAX_DOCUMENTS = 100_000  # documents of a cached file; a larger file is read again, to save memory
Documents = Sequence[tuple[str, str]]  # (id, digest)
_decode = msgspec.msgpack.Decoder(list[tuple[str, str]]).decode


class FileCache:
    """(id, digest) of each file's documents, valid while the file's stamp, label and settings stay the same."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open(path)
        except sqlite3.DatabaseError:
            path.unlink()
            self._open(path)

    def _open(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute(
            "PRAGMA synchronous = OFF"
        )  # a power cut costs the cache, not a document
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, version BLOB, documents BLOB)"
        )

    def get(self, file: SourceFile, settings: str) -> Documents | None:
        """The documents of a file; None if the file is new or changed, or was read with other settings."""
        try:
            query = "SELECT documents FROM files WHERE path = ? AND version = ?"
            row = self._database.execute(
                query, (os.fsencode(file.path), _version(file, settings))
            ).fetchone()
            return None if row is None else _decode(row[0])
        except (sqlite3.DatabaseError, msgspec.DecodeError):
            return None

    def put(self, file: SourceFile, settings: str, documents: Documents) -> None:
        """Store the documents of a file that was read completely."""
        if len(documents) <= MAX_DOCUMENTS:
            row = (
                os.fsencode(file.path),
                _version(file, settings),
                msgspec.msgpack.encode(documents),
            )
            self._database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", row)

    def close(self) -> None:
        self._database.close()


def _version(file: SourceFile, settings: str) -> bytes:
    return orjson.dumps([file.label, file.size, *file.stamp, settings])


SOURCES, LEASE = "ingest_sources", "ingest_lease"  # keys of a collection's metadata
RENEW_S, LEASE_S, POLL_S = 10.0, 40.0, 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder in a collection. `place`: its known path. `label`: the start of its files' labels, and so of its
    documents' ids. `known`: {path: name} of the collection's sources, from the metadata. `is_new`: this source is not among
    them. `is_taken_over`: it is new and the user chose no name, so points under its name are of 0.1."""

    place: Path
    label: str
    known: Mapping[Path, str] = field(default_factory=dict)
    is_new: bool = False
    is_taken_over: bool = False

    @classmethod
    def of(
        cls, source: Path, existing: CollectionSchema | None, chosen: str | None = None
    ) -> Source:
        """The source of this path. `chosen`: the user's name for it. Raises InvalidInput if another path has its name."""
        place = Path(printable(str(source.resolve())))
        found = existing.metadata.get(SOURCES) if existing is not None else None
        known = (
            {Path(str(path)): str(name) for name, path in found.items()}
            if isinstance(found, Mapping)
            else {}
        )
        for above in (place, *place.parents):
            if above in known and chosen in (None, known[above]):
                return cls(place, "/".join((known[above], *place.relative_to(above).parts)), known)
        name = chosen or place.name or "root"
        other = next((path for path, taken in known.items() if taken == name), None)
        if chosen is None and other is not None:
            raise InvalidInput(
                f"{place}: the collection has a source {name!r}, which is {other}. Name this source with --source-name "
                f"NAME; if it is the same source at a new path, use --source-name {name}"
            )
        return cls(place, name, known, is_new=True, is_taken_over=chosen is None)

    @property
    def labels(self) -> list[str]:
        """The labels of this source and of sources inside it."""
        return [
            self.label,
            *(name for path, name in self.known.items() if self.place in path.parents),
        ]

    @property
    def record(self) -> dict[str, Any]:
        """The metadata of a new source."""
        sources = {name: str(path) for path, name in self.known.items()} | {
            self.label: str(self.place)
        }
        return {SOURCES: sources} if self.is_new else {}


@asynccontextmanager
async def claimed(
    store: Store, name: str, schema: CollectionSchema, lock: Path, tell: Callable[[str], None]
) -> AsyncIterator[CollectionSchema]:
    """Hold the collection, created from `schema` if missing; no other ingest can write to it meanwhile.

    `lock`: the file to lock for an embedded store. Raises InvalidInput if another ingest runs.
    """
    async with AsyncExitStack() as stack:
        if store.kind == "embedded":
            stack.enter_context(locked(lock))
        if await store.describe(name) is None:
            try:
                await store.create(name, schema)
            except StoreError:  # another process may have created it meanwhile
                if await store.describe(name) is None:
                    raise
        if store.kind != "embedded":
            await stack.enter_async_context(leased(store, name, tell))
        found = await store.describe(name) or schema
        check_fits(found, schema, name)
        yield found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. Raises InvalidInput if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not on Windows
            pass
        except OSError as error:
            raise InvalidInput(f"{path}: another ingest into this collection is running") from error
        yield


@asynccontextmanager
async def leased(store: Store, name: str, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold a collection's lease, and renew it. Raises InvalidInput if another ingest holds it, StoreError if another one takes
    it over. A server without metadata has no lease."""
    ours = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
    await _wait_until_free(store, name, tell)
    await store.annotate(name, {LEASE: {"holder": ours, "renewed": 0}})
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(_renew(store, name, ours))
            try:
                yield
            finally:
                renewing.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        with suppress(StoreError):
            if (await _lease(store, name)).get("holder") == ours:
                await store.annotate(name, {LEASE: None})


async def _lease(store: Store, name: str) -> Mapping[str, Any]:
    schema = await store.describe(name)
    found = None if schema is None else schema.metadata.get(LEASE)
    return found if isinstance(found, Mapping) else {}


async def _wait_until_free(store: Store, name: str, tell: Callable[[str], None]) -> None:
    """Wait until the lease's holder is dead. Raises InvalidInput as soon as the holder renews the lease."""
    first, since = await _lease(store, name), time.monotonic()
    if not first or _has_ended(str(first.get("holder"))):
        return
    tell(
        f"waiting   at most {LEASE_S:g} s, whether the ingest of {first.get('holder')} is still running"
    )
    while time.monotonic() - since < LEASE_S and (now := await _lease(store, name)):
        if now != first:
            raise InvalidInput(f"another ingest into {name!r} is running: {now.get('holder')}")
        await asyncio.sleep(POLL_S)


def _has_ended(holder: str) -> bool:
    """True if the holder was a process of this machine that has ended."""
    host, _, rest = holder.partition(":")
    process = rest.partition(":")[0]
    if host != socket.gethostname() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


async def _renew(store: Store, name: str, ours: str) -> None:
    renewed = 0
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            holder = (await _lease(store, name)).get("holder", ours)
            renewed += 1
            if holder == ours:
                await store.annotate(name, {LEASE: {"holder": ours, "renewed": renewed}})
        except StoreError:  # the writer meets the same error and reports it
            continue
        if holder != ours:
            raise StoreError(
                f"collection {name!r}: the ingest of {holder} has taken over, and this one ends"
            )
