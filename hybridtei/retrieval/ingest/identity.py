"""Whose a collection's documents are, and who writes: both are in the collection's metadata.

A source is a resolved path, and has a name in the collection: the last part of the path, or `--source-name`. The metadata say
which path a name stands for. A file or folder below a known path belongs to that source, so it can be refreshed alone.
Collections of 0.1 have names without paths: the first ingest of a path takes its name over.

One ingest at a time writes to a collection: in a folder here by a locked file, on a server by a lease in the metadata, which
its holder renews. A lease that was not renewed for `LEASE_S` is a dead ingest's; clocks are not compared.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtei.errors import InvalidInput, StoreError
from hybridtei.retrieval.ingest.files import printable
from hybridtei.retrieval.store.base import CollectionSchema, Store
from hybridtei.retrieval.store.collection import check_fits

SOURCES, LEASE = "ingest_sources", "ingest_lease"  # keys of a collection's metadata
RENEW_S, LEASE_S, POLL_S = 10.0, 40.0, 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder in a collection. `place`: the path by which it is known; `label`: begins the labels of its files, and so
    the ids of its documents; `known`: {path: name} of the collection's sources, by its metadata. `is_taken_over`: its name
    was chosen by nobody and is not known, so what is stored under it is of 0.1."""

    place: Path
    label: str
    known: Mapping[Path, str] = field(default_factory=dict)
    is_taken_over: bool = False

    @classmethod
    def of(cls, source: Path, existing: CollectionSchema | None, chosen: str | None = None) -> Source:
        """The source of this path. `chosen`: the user's name for it. Raises InvalidInput where its name is another path's."""
        place = Path(printable(str(source.resolve())))
        found = existing.metadata.get(SOURCES) if existing is not None else None
        known = {Path(str(path)): str(name) for name, path in found.items()} if isinstance(found, Mapping) else {}
        for above in (place, *place.parents):
            if above in known and chosen in (None, known[above]):
                return cls(place, "/".join((known[above], *place.relative_to(above).parts)), known)
        name = chosen or place.name or "root"
        other = next((path for path, taken in known.items() if taken == name), None)
        if chosen is None and other is not None:
            raise InvalidInput(
                f"{place}: the collection has a source {name!r}, which is {other}. Name this one by --source-name NAME; if it "
                f"is the same source at another place, by --source-name {name}"
            )
        return cls(place, name, known, is_taken_over=chosen is None)

    @property
    def labels(self) -> list[str]:
        """The labels of this source, and of those that lie within it."""
        return [self.label, *(name for path, name in self.known.items() if self.place in path.parents)]

    @property
    def record(self) -> dict[str, Any]:
        """The metadata that record a new source."""
        if any(
            self.known.get(path) == self.label.rsplit("/", up)[0] for up, path in enumerate((self.place, *self.place.parents))
        ):
            return {}
        return {SOURCES: {name: str(path) for path, name in self.known.items()} | {self.label: str(self.place)}}


@asynccontextmanager
async def claimed(
    store: Store, name: str, schema: CollectionSchema, lock: Path, tell: Callable[[str], None]
) -> AsyncIterator[CollectionSchema]:
    """The collection, made of `schema` if it is missing; no other ingest writes to it meanwhile.

    `lock`: the file to lock for an embedded store. Raises InvalidInput where another ingest runs.
    """
    async with AsyncExitStack() as stack:
        if store.kind == "embedded":
            stack.enter_context(locked(lock))
        if await store.describe(name) is None:
            try:
                await store.create(name, schema)
            except StoreError:  # another process may have made it just now
                if await store.describe(name) is None:
                    raise
        if store.kind != "embedded":
            await stack.enter_async_context(leased(store, name, tell))
        found = await store.describe(name) or schema
        check_fits(found, schema, name)
        yield found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. Raises InvalidInput where another process holds it."""
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
    """Hold a collection's lease, and renew it. Raises InvalidInput where another ingest holds it, StoreError once another has
    taken it over. A server that keeps no metadata has no lease."""
    ours = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
    await _wait_until_free(store, name, tell)
    await store.annotate(name, {LEASE: {"holder": ours, "renewed": 0}})
    task, renewing = asyncio.current_task(), asyncio.create_task(_renew(store, name, ours))
    assert task is not None
    renewing.add_done_callback(lambda ended: None if ended.cancelled() else task.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if renewing.done() and (lost := renewing.exception()) is not None:
            task.uncancel()
            raise lost from None
        raise
    finally:
        renewing.cancel()
        with suppress(StoreError):
            if (await _lease(store, name)).get("holder") == ours:
                await store.annotate(name, {LEASE: None})


async def _lease(store: Store, name: str) -> Mapping[str, Any]:
    schema = await store.describe(name)
    found = None if schema is None else schema.metadata.get(LEASE)
    return found if isinstance(found, Mapping) else {}


async def _wait_until_free(store: Store, name: str, tell: Callable[[str], None]) -> None:
    """Return once the lease has no living holder. Raises InvalidInput as soon as its holder renews it."""
    first, since = await _lease(store, name), time.monotonic()
    if not first or _has_ended(str(first.get("holder"))):
        return
    tell(f"waiting   at most {LEASE_S:g} s, whether the ingest of {first.get('holder')} is still running")
    while time.monotonic() - since < LEASE_S and (now := await _lease(store, name)):
        if now != first:
            raise InvalidInput(f"another ingest into {name!r} is running: {now.get('holder')}")
        await asyncio.sleep(POLL_S)


def _has_ended(holder: str) -> bool:
    """Whether it is a process of this machine that has ended."""
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
        except StoreError:  # the writer has the same trouble, and says so
            continue
        if holder != ours:
            raise StoreError(f"collection {name!r}: the ingest of {holder} has taken over, and this one ends")
