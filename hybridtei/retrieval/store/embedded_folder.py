"""The folder of the embedded engine, opened by a single process. A collection is a folder inside,
with `layout.json` and `shard/`. An alias is a folder whose layout names another collection. Layouts
are replaced whole: a crash leaves the old or the new one. The engine does not optimize by itself,
so its process calls `tidy` when idle.

A panic of the engine raises a `BaseException` that is no `Exception`. After a panic at a write, the
write-ahead log has an entry that may panic again at every write and load, so the collection becomes
read-only.
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
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import qdrant_edge as edge

from hybridtei.errors import FolderReplaced, StoreError
from hybridtei.retrieval.store.base import LAYOUT, merged
from hybridtei.retrieval.store.embedded_conversions import (
    Plain,
    config_of,
    filter_of,
    index_of,
    payload_selector,
    plain_id,
    plain_point,
    point_of,
    request_of,
)
from hybridtei.system import machine
from hybridtei.system.frames import encoded

T = TypeVar("T")
SHARD = "shard"
# Key of an alias's layout
ALIAS_OF = "alias_of"
# Points written before an optimization is worth it
OPTIMIZE_AFTER = 1000
# Written bytes, or seconds since the first of these writes, before a flush under traffic: they
# bound the replay after a crash.
FLUSH_BYTES, FLUSH_S = 16_000_000, 5.0
MAX_ANSWER_BYTES = 2**28
# Free bytes on the disk for a write: a segment of the write-ahead log
MIN_FREE_BYTES = 2**25
# Before failed housekeeping is tried again
PAUSE_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Collection:
    """An open collection."""

    shard: Any
    # The folder of the shard, and its descriptor, without which the system could give its inode
    # to another folder.
    path: Path
    folder: int
    # Points at the last optimization, and points written since.
    points: int
    dirty_s: float
    written: int = OPTIMIZE_AFTER
    # Not flushed yet: at first what the write-ahead log held.
    dirty: bool = True
    dirty_bytes: int = 0
    # Why it is read-only.
    broken: str | None = None
    # The time of the next try of failed housekeeping.
    resume_s: float = 0.0

    def check_current(self) -> None:
        """Raises FolderReplaced if the path leads to another folder or to none."""
        if not machine.is_same_file(self.path, self.folder):
            raise FolderReplaced(f"{self.path} was deleted or replaced while it was in use")

    @property
    def is_worn(self) -> bool:
        """True if most of the stored points were written again or deleted since the last
        optimization."""
        if self.written < OPTIMIZE_AFTER:
            return False
        points: int = self.shard.info().points_count
        return self.written - (points - self.points) >= max(OPTIMIZE_AFTER, points)


class Folder:
    """All collections below an existing path, which only this process opens."""

    # The calls that open the collection named by their first argument, and the others.
    OPENING: ClassVar = frozenset(
        {
            "upsert",
            "query",
            "retrieve",
            "scroll",
            "count",
            "delete",
            "set_payload",
            "index",
            "optimize",
        }
    )
    CALLS: ClassVar = OPENING | {
        "collections",
        "describe",
        "create",
        "drop",
        "annotate",
        "aliases",
        "alias",
        "flush",
    }

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
        self._merge(name, "metadata", metadata)

    def _merge(self, name: str, part: str, values: Plain) -> None:
        layout = self.describe(name)
        if layout is None:
            raise StoreError(f"there is no collection {name!r} in {self.path}")
        layout[part] = merged(layout.get(part, {}), values)
        _write_layout(self.path / self._stored_as(name), layout)

    def alias(self, name: str, collection: str) -> None:
        """Make `name` an alias of a collection. Deletes the points of a collection called
        `name`."""
        self._forget(name)
        home = self.path / name
        home.mkdir(exist_ok=True)
        _write_layout(home, {ALIAS_OF: collection})
        shutil.rmtree(home / SHARD, ignore_errors=True)

    def _layouts(self) -> Iterator[tuple[str, Any]]:
        """The layouts of all folders but the unreadable ones, whose faults do not concern the
        others."""
        for file in self.path.glob(f"[!.]*/{LAYOUT}"):
            try:
                layout = self._layout(file.parent.name)
            except (StoreError, OSError) as error:
                log.warning("%s is not listed: %s", file.parent, error)
            else:
                if layout is not None:
                    yield file.parent.name, layout

    def _layout(self, name: str) -> Any:
        """The content of a folder's layout, or None. Raises StoreError if it is damaged,
        UnsafeFile."""
        path = f"{name}/{LAYOUT}"
        try:
            with open(machine.open_own(self.path, path, os.O_RDONLY), encoding="utf-8") as file:
                layout = json.load(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.path / path} is damaged: {error}") from error
        if not isinstance(layout, dict):
            raise StoreError(f"{self.path / path} is damaged: it should hold an object")
        return layout

    def _stored_as(self, name: str) -> str:
        """The collection of a name, which may be an alias."""
        target = str((self._layout(name) or {}).get(ALIAS_OF, name))
        if target.startswith(".") or Path(target).name != target:
            raise StoreError(f"{self.path / name / LAYOUT} is damaged: no collection is {target!r}")
        return target

    def create(self, name: str, layout: Plain) -> None:
        """Create the collection under a temporary name and rename it: a crash leaves all of it or
        nothing."""
        home = self.path / name
        if home.exists():
            raise StoreError(f"there is a collection {name!r} already")
        self._check_room()
        temporary = self.path / f".new-{uuid4().hex}"
        try:
            with _panics(f"collection {name!r} could not be made"):
                edge.EdgeShard.create(str(temporary / SHARD), config_of(layout)).close()
            _write_layout(temporary, layout)
            os.rename(temporary, home)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def drop(self, name: str) -> None:
        """Rename the collection, then delete it. No error if it does not exist."""
        self._forget(name)
        home = self.path / name
        if home.is_dir():
            if home.is_symlink():
                home.unlink()
                return
            temporary = self.path / f".old-{uuid4().hex}"
            os.rename(home, temporary)
            shutil.rmtree(temporary, ignore_errors=True)

    def upsert(self, name: str, points: list[Any]) -> None:
        """Store points: on return they are searchable and in the write-ahead log."""
        upserted = [point_of(point) for point in points]
        self._write(
            name, points, lambda shard: shard.update(edge.UpdateOperation.upsert_points(upserted))
        )

    def delete(self, name: str, ids: list[Any]) -> None:
        """Delete points. No error for ids that do not exist."""
        self._write(name, ids, lambda shard: shard.update(edge.UpdateOperation.delete_points(ids)))

    def set_payload(self, name: str, ids: list[Any], values: dict[str, Any]) -> None:
        """Set keys of payloads. None removes a key."""
        operation = edge.UpdateOperation.set_payload(ids, values)
        self._write(name, [ids, values], lambda shard: shard.update(operation))

    def index(self, name: str, indexes: dict[str, str]) -> None:
        """Make payload indexes, {key: kind}."""
        for key, kind in indexes.items():
            operation = edge.UpdateOperation.create_field_index(key, index_of(kind))
            self._write(name, [key], methodcaller("update", operation))
        self._merge(name, "indexes", indexes)

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
        collection.written, collection.dirty, collection.dirty_bytes = 0, False, 0
        collection.points = collection.shard.info().points_count

    def flush(self) -> None:
        """Write the write-ahead log and memory to the collections' files."""
        for name, collection in self._open.items():
            if collection.dirty and collection.broken is None:
                self._flush(name, collection)

    def tidy(self, *, optimizing: bool, is_idle: bool = True) -> bool:
        """Do the most urgent piece of housekeeping, a short flush or an optimization. Return False
        if none is due.

        `is_idle`: flush every write; otherwise those of `FLUSH_BYTES` or `FLUSH_S`. `optimizing`:
        merge and index new points, which may take half a minute; otherwise only collections whose
        points were mostly replaced. A failure (a full disk) is logged once, and tried again a
        minute later. Raises FolderReplaced.
        """
        for name, collection in self._open.items():
            if collection.broken is not None or collection.resume_s > self._clock():
                continue
            is_old = self._clock() - collection.dirty_s >= FLUSH_S
            if collection.dirty and (is_idle or is_old or collection.dirty_bytes >= FLUSH_BYTES):
                work = partial(self._flush, name, collection)
            elif collection.is_worn or (optimizing and collection.written >= OPTIMIZE_AFTER):
                work = partial(self.optimize, name)
            else:
                continue
            self._try(name, collection, work)
            return True
        return False

    def _try(self, name: str, collection: _Collection, work: Callable[[], object]) -> None:
        """Do a piece of housekeeping, or set the time of its next try. Raises FolderReplaced."""
        try:
            work()
        except FolderReplaced:
            raise
        except Exception as error:
            if not collection.resume_s:
                log.warning(
                    "collection %r in %s: housekeeping failed and is retried later: %s",
                    name,
                    self.path,
                    error,
                )
            collection.resume_s = self._clock() + PAUSE_S
        else:
            collection.resume_s = 0.0

    def _flush(self, name: str, collection: _Collection) -> None:
        self._change(name, collection, lambda shard: shard.flush())
        collection.dirty, collection.dirty_bytes = False, 0

    def open(self, name: str) -> None:
        """Open a collection, if it is not. This replays its write-ahead log, which may take minutes
        after a crash."""
        self._collection(name)

    def close(self) -> None:
        """Flush all collections. Raises FolderReplaced."""
        for name in list(self._open):
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Flush and close a collection, if it is open. Raises FolderReplaced."""
        if name in self._open:
            self._open[name].check_current()
            _close(self._open.pop(name))

    def _collection(self, name: str, *, writing: bool = False) -> _Collection:
        """Return an open collection, opened here if it is not. `name` may be an alias."""
        collection = self._open.get(name)
        if collection is None:
            name = self._stored_as(name)
            collection = self._open.get(name)
        if collection is None:
            if not (self.path / name / LAYOUT).is_file():
                raise StoreError(f"there is no collection {name!r} in {self.path}")
            machine.check_own_tree(self.path / name)
            path = self.path / name / SHARD
            with _panics(
                f"collection {name!r} in {self.path} is damaged and cannot be opened: restore its "
                "folder, or drop it"
            ):
                shard = edge.EdgeShard.load(str(path))
            folder = os.open(path, os.O_RDONLY)
            # As if the last optimization were `OPTIMIZE_AFTER` new points ago.
            points = shard.info().points_count - OPTIMIZE_AFTER
            collection = _Collection(shard, path, folder, points, dirty_s=self._clock())
            self._open[name] = collection
        collection.check_current()
        if writing and collection.broken is not None:
            raise StoreError(collection.broken)
        return collection

    def _read(self, name: str, call: Callable[[Any], T]) -> T:
        shard = self._collection(name).shard
        with _panics(f"the engine failed internally at a query to collection {name!r}"):
            return call(shard)

    def _write(self, name: str, points: list[Any], call: Callable[[Any], object]) -> None:
        collection = self._collection(name, writing=True)
        self._check_room()
        if not collection.dirty:
            collection.dirty, collection.dirty_s = True, self._clock()
        collection.dirty_bytes += len(bytes(encoded(points)))
        self._change(name, collection, call)
        collection.written += len(points)

    def _check_room(self) -> None:
        """Raises StoreError if the disk is full, where the engine would wait or panic."""
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if free < MIN_FREE_BYTES:
            raise StoreError(
                f"{self.path}: the disk is full: {free} bytes are free, wanted are {MIN_FREE_BYTES}"
            )

    def _change(self, name: str, collection: _Collection, call: Callable[[Any], object]) -> None:
        """Change the collection. A panic makes it read-only. Raises FolderReplaced."""
        collection.check_current()
        try:
            with _panics(""):
                call(collection.shard)
        except StoreError as error:
            collection.broken = (
                f"collection {name!r} in {self.path} is read-only: the engine failed internally "
                f"at a write ({error}). Its points can still be read and copied; to write again, "
                "delete and refill it"
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
                f"the answer's {len(points)} points are too large: {place} of them take {size} "
                f"bytes, allowed are {MAX_ANSWER_BYTES}; ask for fewer at once (`limit`), or "
                "without vectors or payloads"
            )
    return answer


def _write_layout(home: Path, layout: Plain) -> None:
    """Replace the layout of a collection's folder: a crash leaves the old one or the new one.
    Raises UnsafeFile."""
    machine.check_own(home)
    with machine.written_whole(home / LAYOUT) as file:
        file.write(json.dumps(layout).encode())
        file.flush()
        os.fsync(file.fileno())


def _close(collection: _Collection) -> None:
    with contextlib.suppress(Exception, StoreError), _panics(""):
        if collection.broken is None:
            collection.shard.flush()
        collection.shard.close()
    os.close(collection.folder)


@contextlib.contextmanager
def _panics(message: str) -> Iterator[None]:
    """A context that turns the engine's panic, which is not an `Exception`, into a StoreError.
    Other errors pass."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise StoreError(f"{message}: {error}" if message else str(error)) from error
