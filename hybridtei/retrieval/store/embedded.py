"""The embedded engine as a store: a local folder, owned by a process that all commands share.

The engine runs only in that process, since it holds the GIL for whole calls, panics, and is ruined
by some invalid points. The first call starts or joins the process, and again after its death. The
process runs one call at a time; others wait here, at most as many as can be answered in time. A
cancelled waiting call is never executed. If the process dies during a call, the call may or may not
have had an effect and raises StoreUnavailable. Ids of points never change, so a retry is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar

from msgspec import convert

from hybridtei.errors import (
    FolderReplaced,
    StoreAtCapacity,
    StoreError,
    StoreUnavailable,
    UnsafeFile,
)
from hybridtei.retrieval.store.base import (
    LAYOUT,
    CollectionSchema,
    PointId,
    Selector,
    Store,
    Stored,
    check_ids,
    identity,
)
from hybridtei.retrieval.store.collection import check_name, check_names, schema_to_dict
from hybridtei.retrieval.store.embedded_process import LOCK, is_own, listening_at, release
from hybridtei.retrieval.store.points import checked_batches
from hybridtei.retrieval.store.query import Filter, Query
from hybridtei.system import machine
from hybridtei.system.forks import leave_to_parent, renew_in_children
from hybridtei.system.frames import HEADER, frame, unframe
from hybridtei.system.own_loop import started

log = logging.getLogger(__name__)

START_S = 60.0
# How long a folder's owner may take to start or end; between attempts
TAKEN_S, RETRY_S = 5.0, 0.1
CLOSE_S = 120.0
# Waiting calls, even fast ones, since each holds its arguments
MAX_WAITING = 1000
# Weight of the newest call in a mean duration
NEWEST_SHARE = 0.1
# Larger answers are decoded in a thread
MAX_INLINE_BYTES, MAX_INLINE_POINTS = 10**6, 5_000
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH")
WITHOUT_COLLECTIONS: Mapping[str, Any] = {
    "collections": [],
    "aliases": {},
    "describe": None,
    "drop": None,
}


class EmbeddedStore(Store):
    """One folder, which any number of a user's processes may open. For one event loop.

    While the folder has no collection, only `create` starts a process, and reads create no file or
    folder.
    """

    kind = "embedded"
    command: ClassVar[tuple[str, ...]] = ("-m", "hybridtei.retrieval.store.embedded_process")

    def __init__(
        self, path: str, *, timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._timeout_s, self._clock = path, timeout_s, clock
        # Absolute, since the process has another working folder
        self._folder = Path(os.path.abspath(path))
        self._lock = self._folder / LOCK
        self.place = f"embedded Qdrant in {self._folder}"
        # Mean duration of calls by name
        self._mean_s: dict[str, float] = {}
        # Of the latest process
        self.pid: int | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.renew()
        renew_in_children(self)
        # Of the folder that the process has open
        self._identity: tuple[int, ...] | None = None
        self._closed = False

    def renew(self) -> None:
        """Leave the connection to the parent of this forked process, whose own joins later."""
        leave_to_parent(self._streams)
        self._streams = None
        self._starting: asyncio.Task[None] | None = None
        # Held while the process executes a call, even if its caller was cancelled
        self._turn = asyncio.Lock()
        # The names of waiting calls, the running one included
        self._waiting: list[str] = []

    async def collections(self) -> list[str]:
        return list(await self._call("collections"))

    async def describe(self, name: str) -> CollectionSchema | None:
        fields = await self._call("describe", name)
        return None if fields is None else convert(fields, CollectionSchema)

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        await self._call("create", name, schema_to_dict(schema))
        await self.index(name, schema.indexes or {})

    async def drop(self, name: str) -> None:
        await self._call("drop", name)

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        await self._call("annotate", name, dict(metadata))

    async def aliases(self) -> dict[str, str]:
        return dict(await self._call("aliases"))

    async def alias(self, name: str, collection: str) -> None:
        await self._call("alias", name, collection)

    async def upsert(
        self, name: str, points: Sequence[Stored], schema: CollectionSchema | None = None
    ) -> None:
        for batch in await checked_batches(self, name, points, schema):
            await self._call("upsert", name, batch)

    async def query(self, name: str, query: Query) -> list[Stored]:
        return await _points(await self._call("query", name, query))

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        check_ids(ids)
        return await _points(
            await self._call("retrieve", name, list(ids), with_payload, with_vectors)
        )

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: Filter | None = None,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> tuple[list[Stored], PointId | None]:
        page = {"limit": limit, "offset": offset, "filter": scroll_filter}
        points, following = await self._call("scroll", name, page, with_payload, with_vectors)
        return await _points(points), following

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
        return int(await self._call("count", name, count_filter))

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        check_ids(ids)
        await self._call("delete", name, list(ids))

    async def index(self, name: str, indexes: Mapping[str, str]) -> None:
        # Each is a call of its own: an index takes long, and other calls get the engine in between
        for key, kind in indexes.items():
            await self._call("index", name, {key: kind})

    async def set_payload(
        self, name: str, ids: Sequence[PointId], values: Mapping[str, Any]
    ) -> None:
        check_ids(ids)
        await self._call("set_payload", name, list(ids), values)

    async def optimize(self, name: str) -> None:
        """Merge and index now. Other calls wait, even for minutes. The process does so by itself
        when idle."""
        await self._call("optimize", name, is_bounded=False)

    async def close(self) -> None:
        """Wait for the answers of all calls, and for the flush of all writes."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._is_joined:
            # The flush runs after the waiting calls
            with contextlib.suppress(StoreError):
                await self._ask("flush", timeout_s=CLOSE_S, is_joined=True)
        if (writer := self._leave()) is not None:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _call(self, call: str, *arguments: Any, is_bounded: bool = True) -> Any:
        """Call the process; the first argument is a collection's name. Raises StoreError with the
        process's message, StoreUnavailable if it dies or takes too long, and StoreAtCapacity at
        once if the waiting calls leave no time for this one."""
        if arguments:
            check_name(arguments[0])
        if self._closed:
            raise StoreError(f"{self._path}: the store is closed")
        is_joined = self._is_joined
        if not is_joined and not self._holds_collections():
            if call in WITHOUT_COLLECTIONS:
                return WITHOUT_COLLECTIONS[call]
            if call != "create":
                raise StoreError(
                    f"embedded Qdrant: there is no collection {arguments[0]!r} in {self._folder}"
                )
        if is_bounded and self._waiting:
            self._admit()
        timeout_s = self._timeout_s if is_bounded else None
        return await self._ask(call, *arguments, timeout_s=timeout_s, is_joined=is_joined)

    @property
    def _is_joined(self) -> bool:
        """True if there is a connection, its other end is not known to be gone, and the folder is
        still the one it has open."""
        if self._streams is None or self._streams[0].at_eof():
            return False
        return identity(self._lock) == self._identity

    def _holds_collections(self) -> bool:
        try:
            return any((entry / LAYOUT).is_file() for entry in self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._unusable(error) from error

    def _admit(self) -> None:
        """Raises StoreAtCapacity if the waiting calls will take longer than a call may."""
        waiting = len(self._waiting)
        expected_s = 0.0
        for name in self._waiting:
            expected_s += self._mean_s.get(name, 0.0)
        if waiting >= MAX_WAITING or expected_s > self._timeout_s:
            raise StoreAtCapacity(
                f"{self._path}: {waiting} calls wait for the embedded Qdrant engine, about "
                f"{expected_s:.1f} s of work; one more would not be answered within "
                f"{self._timeout_s:g} s (qdrant-timeout): try again later"
            )

    async def _ask(
        self, call: str, *arguments: Any, timeout_s: float | None, is_joined: bool
    ) -> Any:
        message = frame([call, arguments])
        self._waiting.append(call)
        try:
            for is_repeated in (False, True):
                if is_repeated or not is_joined:
                    # Outside the call's timeout, since a start has its own bound
                    await self._joined()
                async with asyncio.timeout(timeout_s):
                    await self._turn.acquire()
                    word, answer = await asyncio.shield(self._exchange(call, message))
                # The process found its folder replaced: repeat the call once, in the new folder
                if word != "replaced":
                    break
        except TimeoutError as error:
            raise self._silent(timeout_s, ", or raise `qdrant_timeout`") from error
        except (EOFError, ConnectionError) as error:
            if identity(self._lock) != self._identity:
                raise self._replaced("") from error
            raise StoreUnavailable(
                f"{self._path}: the process of the embedded Qdrant engine has ended; the next call "
                "starts it again"
            ) from error
        finally:
            self._waiting.remove(call)
        if word == "done":
            return answer
        if word == "replaced":
            raise self._replaced(f": {answer}")
        kind = UnsafeFile if word == "unsafe" else StoreError
        raise kind(f"embedded Qdrant: {answer}")

    async def _exchange(self, call: str, message: bytes) -> Any:
        """Send a call and read its whole answer, even if the caller was cancelled, since the next
        answer follows it."""
        if self._streams is None:
            self._turn.release()
            raise EOFError
        reader, writer = self._streams
        try:
            began_s = self._clock()
            writer.write(message)
            answer = await _receive(reader)
            took_s = self._clock() - began_s
            mean_s = self._mean_s.get(call, took_s)
            self._mean_s[call] = mean_s + (took_s - mean_s) * NEWEST_SHARE
            if answer[0] == "replaced" and self._streams == (reader, writer):
                self._leave()
            return answer
        except (EOFError, ConnectionError):
            if self._streams == (reader, writer):
                self._leave()
            raise
        finally:
            self._turn.release()

    def _leave(self) -> asyncio.StreamWriter | None:
        """Close the connection, if there is one."""
        if self._streams is None:
            return None
        _, writer = self._streams
        self._streams = None
        writer.close()
        return writer

    async def _joined(self) -> None:
        """Connect to the process, if not connected. Callers share one start, and cancelling a
        caller does not stop it."""
        if not self._is_joined:
            if self._streams is not None and identity(self._lock) != self._identity:
                log.warning("%s was deleted or replaced: its new content is opened", self._folder)
            if self._starting is None or self._starting.done():
                self._starting = started(self._join())
            await asyncio.shield(self._starting)

    async def _join(self) -> None:
        """Connect to the folder's process, or start it. Raises StoreError with the reason."""
        begun_s = self._clock()
        # The first time that another process had the folder
        taken_s: float | None = None
        self._leave()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        while True:
            try:
                return await self._connect()
            except UnsafeFile:
                raise
            except (OSError, EOFError):
                # No process listens, or it is ending: start one below
                pass
            word, message = await asyncio.to_thread(self._start)
            now_s = self._clock()
            if word == "taken" and taken_s is None:
                taken_s = now_s
            # On a busy machine the start took seconds, in which the owner may have become ready
            is_kept = taken_s is not None and now_s - taken_s > TAKEN_S
            if word == "refused" or (word == "taken" and is_kept):
                raise StoreError(message)
            if word == "dead" or now_s - begun_s > START_S:
                raise StoreUnavailable(
                    f"{self._path}: the process of the embedded Qdrant engine does not start: "
                    f"{message}"
                )
            if word == "taken":
                await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        """Connect. Raises OSError or EOFError if no process listens, StoreError for another
        release's process."""
        folder = identity(self._lock)
        place = listening_at(self._folder)
        if place is None:
            raise FileNotFoundError(self._folder)
        reader, writer = await asyncio.open_unix_connection(place)
        try:
            if not is_own(writer.get_extra_info("socket")):
                raise StoreError(f"{self._path}: {place} is another user's")
            try:
                async with asyncio.timeout(START_S):
                    theirs, self.pid = await _receive(reader)
            except TimeoutError as error:
                raise self._silent(START_S) from error
            if theirs != release():
                raise StoreError(
                    f"{self._path}: the folder is in use by {theirs}, and this is {release()}: "
                    "use one release of both, or wait until the other release's commands have "
                    "ended"
                )
        except BaseException:
            writer.close()
            raise
        self._streams, self._identity = (reader, writer), folder

    def _start(self) -> tuple[str, str]:
        """Start a process and wait for its word: `ready`, `taken`, `refused` or `dead`, and the
        reason."""
        # The process outlives its starter and serves other commands, so it gets no keys.
        environment = {
            name: value
            for name, value in machine.child_environment().items()
            if name in KEPT_VARIABLES or name.startswith("PYTHON")
        }
        try:
            process = subprocess.Popen(
                machine.python_command(*self.command, str(self._folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd=machine.NEUTRAL,
                env={**environment, "RUST_BACKTRACE": "0"},
            )
            line, _ = process.communicate(timeout=START_S)
            word, message = json.loads(line)
        except (OSError, subprocess.TimeoutExpired) as error:
            return "dead", str(error)
        except ValueError:
            return "dead", "it ended without a reason"
        return word, message or ""

    def _silent(self, seconds: float | None, hint: str = "") -> StoreUnavailable:
        """The error of a process that does not answer: during a call the engine also greets no
        client."""
        return StoreUnavailable(
            f"{self._path}: the embedded Qdrant engine has not answered for {seconds:g} s: it may "
            f"be building an index; try later{hint}"
        )

    def _replaced(self, reason: str) -> FolderReplaced:
        return FolderReplaced(
            f"{self._path}: the folder of the embedded Qdrant engine was deleted or replaced "
            f"during a call{reason}; repeat the call, which opens the folder that is there now"
        )

    def _unusable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self._path}: cannot be used as the folder of the embedded Qdrant engine: {error}"
        )


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    body = await reader.readexactly(length)
    if length <= MAX_INLINE_BYTES:
        return unframe(body)
    return await asyncio.to_thread(unframe, body)


async def _points(messages: Sequence[Any]) -> list[Stored]:
    """The points of an answer."""
    if len(messages) > MAX_INLINE_POINTS:
        return await asyncio.to_thread(lambda: list(starmap(Stored, messages)))
    return list(starmap(Stored, messages))
