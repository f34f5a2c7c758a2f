"""Which ledger is a collection's: the collection has an id, and names the ledger that knows all of it.

Both are in the collection's metadata. The id finds the ledger's file by whatever address the server is reached. A ledger has
a mark; where the collection names another one, an ingest elsewhere has written since, or the collection was made anew, and the
ledger is made again from the points, whose payloads have the digests of their documents. Kills are harmless: a ledger is marked
after it is whole, and after the collection names the mark.

An embedded engine's ledger is in the engine's folder. Ledgers of releases before were found by the server's address: the first
ingest takes one over.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridtei.config import StoreConfig
from hybridtei.ingest.chunking import CHUNK, CHUNKS, DIGEST, DOCUMENT_ID, SOURCE, digest_of, document_key
from hybridtei.ingest.ledger import Ledger
from hybridtei.ingest.records import MAX_DOCUMENT_CHARACTERS
from hybridtei.store import collection_state_folder, state_folder
from hybridtei.store.base import CollectionSchema, Store
from hybridtei.store.collection import check_fits
from hybridtei.store.points import point_id

COLLECTION_ID, LEDGER_MARK = "ingest_collection_id", "ingest_ledger_mark"  # keys of a collection's metadata
FIELDS = (SOURCE, DOCUMENT_ID, CHUNK, CHUNKS, DIGEST)
POINTS_AT_ONCE, DOCUMENTS_AT_ONCE = 1000, 10_000


def new_id() -> str:
    """A random id, 32 hexadecimal digits."""
    return uuid.uuid4().hex


async def open_ledger(config: StoreConfig, store: Store, name: str, existing: CollectionSchema | None) -> tuple[Ledger, str]:
    """The collection's ledger and id, a new one where there is none; `existing`: its schema, which fits.

    Raises InvalidInput where another process has locked the ledger.
    """
    identity = _identity_of(existing)
    if config.qdrant_url is None:
        return Ledger(state_folder(config) / f"{name}.ledger.jsonl"), identity or new_id()
    former = _former_path(config, name)
    if existing is not None and identity is None:
        return await _take_over(former, store, name)
    identity = identity or new_id()
    path = _path(identity)
    if existing is not None and former.exists() and not path.exists():  # a kill may have come between the mark and the move
        ledger = Ledger(former)
        if ledger.mark is not None and ledger.mark == existing.metadata.get(LEDGER_MARK):
            ledger.move(path)
            return ledger, identity
        ledger.close()
    return Ledger(path), identity


async def _take_over(former: Path, store: Store, name: str) -> tuple[Ledger, str]:
    """The ledger by address, or a new one, for a collection that gets an id; on a server too old for one it stays there."""
    ledger, identity = Ledger(former), new_id()
    try:
        mark = new_id() if len(ledger) else None
        ledger.set_mark(mark)
        await store.annotate(name, {COLLECTION_ID: identity, **({LEDGER_MARK: mark} if mark else {})})
        if _identity_of(await store.describe(name)) == identity:
            ledger.move(_path(identity))
        else:
            ledger.set_mark(None)
    except BaseException:
        ledger.close()
        raise
    return ledger, identity


async def agree(
    store: Store, name: str, schema: CollectionSchema, ledger: Ledger, identity: str, *, quiet: bool = True
) -> CollectionSchema:
    """The schema of the collection, which this creates where it is missing. The ledger is made again where it is not the
    collection's. Raises CollectionMismatch before anything is done.
    """
    existing = await store.describe(name)
    if existing is None:
        await asyncio.to_thread(ledger.clear)
        named = {COLLECTION_ID: identity, LEDGER_MARK: new_id()}
        await store.create(name, replace(schema, metadata={**schema.metadata, **named}))
        return await _marked(store, name, schema, ledger)
    check_fits(existing, schema, name)
    mark = existing.metadata.get(LEDGER_MARK)
    points = await store.count(name)
    if points and ledger.mark == mark and (mark is not None or len(ledger)):
        return existing
    await asyncio.to_thread(ledger.clear)
    if points:
        await _read_collection(store, name, ledger, points, quiet=quiet)
    await store.annotate(name, {COLLECTION_ID: _identity_of(existing) or identity, LEDGER_MARK: new_id()})
    return await _marked(store, name, existing, ledger)


async def _marked(store: Store, name: str, schema: CollectionSchema, ledger: Ledger) -> CollectionSchema:
    """The collection's schema as it is now; the ledger gets the mark in it, which an old server does not keep."""
    schema = await store.describe(name) or schema
    await asyncio.to_thread(ledger.set_mark, schema.metadata.get(LEDGER_MARK))
    return schema


async def _read_collection(store: Store, name: str, ledger: Ledger, points: int, *, quiet: bool) -> None:
    """Note every document that the collection holds whole, in one version."""
    from tqdm.auto import tqdm

    found = _Found()
    offset = None
    with tqdm(total=points, disable=quiet, desc="reading what is stored", unit=" points", mininterval=0.5) as bar:
        while True:
            records, offset = await store.scroll(name, limit=POINTS_AT_ONCE, offset=offset, with_payload=FIELDS)
            await asyncio.to_thread(found.add, [(str(record.id), record.payload or {}) for record in records])
            bar.update(len(records))
            if offset is None:
                break
    whole = found.whole()
    for start in range(0, len(whole), DOCUMENTS_AT_ONCE):
        await asyncio.to_thread(ledger.add, whole[start : start + DOCUMENTS_AT_ONCE])


class _Found:
    """Documents by their points so far, as much of each as a ledger has: (digest, chunks, points seen)."""

    def __init__(self) -> None:
        self._documents: dict[str, tuple[bytes, int, int]] = {}

    def add(self, points: list[tuple[str, Mapping[str, Any]]]) -> None:
        """Count points; one that no ingest made, or an older release, is passed over."""
        for identity, payload in points:
            source, document_id, number, chunks, _ = (payload.get(field) for field in FIELDS)
            digest = digest_of(payload)
            if digest is None or not isinstance(source, str) or not isinstance(document_id, str):
                continue
            if type(number) is not int or type(chunks) is not int or not 0 <= number < chunks <= MAX_DOCUMENT_CHARACTERS:
                continue
            key = document_key(source, document_id)
            if identity != point_id(key, number):
                continue
            first, count, seen = self._documents.get(key, (digest, chunks, 0))
            is_same = (first, count) == (digest, chunks)
            self._documents[key] = (first, count if is_same else -1, seen + 1)  # -1: of several versions

    def whole(self) -> list[tuple[str, bytes, int]]:
        """(key, digest, chunks) of documents that have all their chunks, all of one version."""
        return [(key, digest, chunks) for key, (digest, chunks, seen) in self._documents.items() if seen == chunks]


def _identity_of(schema: CollectionSchema | None) -> str | None:
    """The collection's id, which names a file."""
    text = None if schema is None else schema.metadata.get(COLLECTION_ID)
    try:
        return uuid.UUID(text).hex if isinstance(text, str) else None
    except ValueError:
        return None


def _path(identity: str) -> Path:
    return collection_state_folder() / f"{identity}.ledger.jsonl"


def _former_path(config: StoreConfig, name: str) -> Path:
    """Of the ledger by address: of all addresses, or else of one of them."""
    assert config.qdrant_url is not None
    urls = [config.qdrant_url, *(url.strip() for url in config.qdrant_url.split(","))]
    paths = [state_folder(StoreConfig(qdrant_url=url)) / f"{name}.ledger.jsonl" for url in urls]
    return next((path for path in paths if path.exists()), paths[0])
