"""The folder of the embedded engine, opened by a single process. A collection is a folder inside, with `layout.json` and
`shard/`. An alias is a folder whose layout names another collection. Layouts are replaced whole: a crash leaves the old or the
new one. The engine does not optimize by itself, so its process calls `tidy` when idle.

A panic of the engine raises a `BaseException` that is no `Exception`. After a panic at a write, the write-ahead log has an
entry that may panic again at every write and load, so the collection becomes read-only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import qdrant_edge as edge

from hybridtei.errors import StoreError
from hybridtei.retrieval.store.base import LAYOUT
from hybridtei.retrieval.store.embedded_conversions import (
    Plain,
    config_of,
    filter_of,
    payload_selector,
    plain_id,
    plain_point,
    point_of,
    request_of,
)
from hybridtei.system.frames import encoded

T = TypeVar("T")
SHARD = "shard"
ALIAS_OF = "alias_of"  # key of an alias's layout
OPTIMIZE_AFTER = 1000  # points written before an optimization is worth it
MAX_ANSWER_BYTES = 2**28
MIN_FREE_BYTES = 2**25  # free bytes on the disk for a write: a segment of the write-ahead log
PAUSE_S = 60.0  # before failed housekeeping is tried again

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Collection:
    """An open collection. `written`: points since the last optimization. `dirty`: not flushed yet. `broken`: why it is
    read-only. `resume_s`: the time of the next try of failed housekeeping."""

    shard: Any
    written: int = OPTIMIZE_AFTER
    dirty: bool = False
    broken: str | None = None
    resume_s: float = 0.0


class Folder:
    """All collections below an existing path, which only this process opens."""

    CALLS: ClassVar = frozenset(
        {
            "collections",
            "describe",
            "create",
            "drop",
            "upsert",
            "query",
            "retrieve",
            "scroll",
            "count",
            "delete",
            "optimize",
        }
        | {"annotate", "aliases", "alias", "flush"}
    )

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._open: dict[str, _Collection] = {}
        for leftover in (*path.glob(".new-*"), *path.glob(".old-*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def collections(self) -> list[str]:
        """The names of all collections, without aliases, sorted."""
        return sorted(name for name, layout in self._layouts() if ALIAS_OF not in layout)

    def aliases(self) -> dict[str, str]:
        """{alias: collection}."""
        return {name: layout[ALIAS_OF] for name, layout in self._layouts() if ALIAS_OF in layout}

    def describe(self, name: str) -> Any:
        """The layout that `create` wrote, or None."""
        return self._layout(self._stored_as(name))

    def annotate(self, name: str, metadata: Plain) -> None:
        """Replace keys of a collection's metadata. None removes a key."""
        layout = self.describe(name)
        if layout is None:
            raise StoreError(f"there is no collection {name!r} in {self.path}")
        merged = {**layout.get("metadata", {}), **metadata}
        layout["metadata"] = {key: value for key, value in merged.items() if value is not None}
        self._write_layout(self._stored_as(name), layout)

    def alias(self, name: str, collection: str) -> None:
        """Make `name` an alias of a collection. Deletes the points of a collection called `name`."""
        if name in self._open:
            _close(self._open.pop(name))
        self._write_layout(name, {ALIAS_OF: collection})
        shutil.rmtree(self.path / name / SHARD, ignore_errors=True)

    def _layouts(self) -> Iterator[tuple[str, Any]]:
        for file in self.path.glob(f"[!.]*/{LAYOUT}"):
            yield file.parent.name, self._layout(file.parent.name)

    def _layout(self, name: str) -> Any:
        file = self.path / name / LAYOUT
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def _write_layout(self, name: str, layout: Plain) -> None:
        home = self.path / name
        home.mkdir(exist_ok=True)
        aside = home / f"{LAYOUT}.new"
        with aside.open("w", encoding="utf-8") as file:
            json.dump(layout, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, home / LAYOUT)

    def _stored_as(self, name: str) -> str:
        """The collection of a name, which may be an alias."""
        return str((self._layout(name) or {}).get(ALIAS_OF, name))

    def create(self, name: str, layout: Plain) -> None:
        """Create the collection under a temporary name and rename it: a crash leaves all of it or nothing."""
        home = self.path / name
        if home.exists():
            raise StoreError(f"there is a collection {name!r} already")
        self._check_room()
        aside = self.path / f".new-{uuid4().hex}"
        aside.mkdir()
        try:
            with _panics(f"collection {name!r} could not be made"):
                edge.EdgeShard.create(str(aside / SHARD), config_of(layout)).close()
            (aside / LAYOUT).write_text(json.dumps(layout), encoding="utf-8")
            os.rename(aside, home)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def drop(self, name: str) -> None:
        """Rename the collection, then delete it. No error if it does not exist."""
        if name in self._open:
            _close(self._open.pop(name))
        home = self.path / name
        if home.is_dir():
            aside = self.path / f".old-{uuid4().hex}"
            os.rename(home, aside)
            shutil.rmtree(aside, ignore_errors=True)

    def upsert(self, name: str, points: list[Any]) -> None:
        """Store points: on return they are searchable and in the write-ahead log."""
        upserted = [point_of(point) for point in points]
        self._write(
            name,
            len(upserted),
            lambda shard: shard.update(edge.UpdateOperation.upsert_points(upserted)),
        )

    def delete(self, name: str, ids: list[Any]) -> None:
        """Delete points. No error for ids that do not exist."""
        self._write(
            name, len(ids), lambda shard: shard.update(edge.UpdateOperation.delete_points(ids))
        )

    def query(self, name: str, request: Plain) -> list[Any]:
        """Records, the best first."""
        query = request_of(request)
        return _bounded(self._read(name, lambda shard: shard.query(query)))

    def retrieve(
        self, name: str, ids: list[Any], with_payload: Any, with_vectors: Any
    ) -> list[Any]:
        """The existing records of these ids."""
        return _bounded(
            self._read(
                name,
                lambda shard: shard.retrieve(ids, payload_selector(with_payload), with_vectors),
            )
        )

    def scroll(self, name: str, page: Plain, with_payload: Any, with_vectors: Any) -> list[Any]:
        """[records, the first id of the next page]."""
        request = edge.ScrollRequest(
            offset=page["offset"],
            limit=page["limit"],
            filter=filter_of(page["filter"]),
            with_payload=payload_selector(with_payload),
            with_vector=with_vectors,
        )
        records, following = self._read(name, lambda shard: shard.scroll(request))
        return [_bounded(records), None if following is None else plain_id(following)]

    def count(self, name: str, count_filter: Any) -> int:
        """The exact number of matching points."""
        request = edge.CountRequest(exact=True, filter=filter_of(count_filter))
        return int(self._read(name, lambda shard: shard.count(request)))

    def optimize(self, name: str) -> None:
        """Merge, index and flush now."""
        collection = self._collection(name, writing=True)
        self._change(name, collection, lambda shard: (shard.optimize(), shard.flush()))
        collection.written, collection.dirty = 0, False

    def flush(self) -> None:
        """Write the write-ahead log and memory to the collections' files."""
        for name, collection in self._open.items():
            if collection.dirty and collection.broken is None:
                self._flush(name, collection)

    def tidy(self, *, optimizing: bool) -> None:
        """Do one piece of housekeeping: a short flush, or else an optimization, which may take half a minute.

        A failure (a full disk) is logged once, and tried again a minute later.
        """
        due = {
            name: one
            for name, one in self._open.items()
            if one.broken is None and one.resume_s <= self._clock()
        }
        dirty = [name for name, one in due.items() if one.dirty]
        grown = [name for name, one in due.items() if optimizing and one.written >= OPTIMIZE_AFTER]
        for name in (dirty or grown)[:1]:
            try:
                self._flush(name, due[name]) if dirty else self.optimize(name)
            except Exception as error:
                if not due[name].resume_s:
                    log.warning(
                        "collection %r in %s: housekeeping failed and is retried later: %s",
                        name,
                        self.path,
                        error,
                    )
                due[name].resume_s = self._clock() + PAUSE_S
            else:
                due[name].resume_s = 0.0

    def _flush(self, name: str, collection: _Collection) -> None:
        self._change(name, collection, lambda shard: shard.flush())
        collection.dirty = False

    def close(self) -> None:
        """Flush all collections."""
        for collection in self._open.values():
            _close(collection)
        self._open.clear()

    def _collection(self, name: str, *, writing: bool = False) -> _Collection:
        collection = self._open.get(name) or self._open.get(name := self._stored_as(name))
        if collection is None:
            if not (self.path / name / LAYOUT).is_file():
                raise StoreError(f"there is no collection {name!r} in {self.path}")
            with _panics(
                f"collection {name!r} in {self.path} is damaged and cannot be opened: restore its folder, or drop it"
            ):
                collection = _Collection(edge.EdgeShard.load(str(self.path / name / SHARD)))
            self._open[name] = collection
        if writing and collection.broken is not None:
            raise StoreError(collection.broken)
        return collection

    def _read(self, name: str, call: Callable[[Any], T]) -> T:
        shard = self._collection(name).shard
        with _panics(f"the engine failed internally at a query to collection {name!r}"):
            return call(shard)

    def _write(self, name: str, count: int, call: Callable[[Any], object]) -> None:
        collection = self._collection(name, writing=True)
        self._check_room()
        collection.dirty = True
        self._change(name, collection, call)
        collection.written += count

    def _check_room(self) -> None:
        """Raises StoreError if the disk is full, where the engine would wait or panic."""
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if free < MIN_FREE_BYTES:
            raise StoreError(
                f"{self.path}: the disk is full: {free} bytes are free, wanted are {MIN_FREE_BYTES}"
            )

    def _change(self, name: str, collection: _Collection, call: Callable[[Any], object]) -> None:
        """A context that changes the collection. A panic makes it read-only."""
        try:
            with _panics(""):
                call(collection.shard)
        except StoreError as error:
            collection.broken = (
                f"collection {name!r} in {self.path} is read-only: the engine failed internally at a write ({error}). Its "
                "points can still be read and copied; to write again, delete and refill it"
            )
            raise StoreError(collection.broken) from error


def _bounded(points: Sequence[Any]) -> list[Any]:
    """Encode each point separately. Raises StoreError as soon as they exceed MAX_ANSWER_BYTES."""
    answer: list[Any] = []
    size = 0
    for place, point in enumerate(points, 1):
        answer.append(encoded(plain_point(point)))
        size += len(answer[-1])
        if size > MAX_ANSWER_BYTES:
            raise StoreError(
                f"the answer's {len(points)} points are too large: {place} of them take {size} bytes, allowed are "
                f"{MAX_ANSWER_BYTES}; ask for fewer at once (`limit`), or without vectors or payloads"
            )
    return answer


def _close(collection: _Collection) -> None:
    with contextlib.suppress(Exception, StoreError), _panics(""):
        if collection.broken is None:
            collection.shard.flush()
        collection.shard.close()


@contextlib.contextmanager
def _panics(message: str) -> Iterator[None]:
    """A context that turns the engine's panic, which is not an `Exception`, into a StoreError. Other errors pass."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise StoreError(f"{message}: {error}" if message else str(error)) from error
