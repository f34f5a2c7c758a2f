"""The embedded engine as a store: a folder here, owned by a process of its own.

The engine is loaded only in that process, since it holds Python's lock for whole calls, panics, and is ruined by a point that
it should have refused. The process starts at the first call, and again after it died. It executes one call at a time and the
others wait here: a call whose caller was cancelled is never executed, and no more of them wait than can be answered in time. A
call that waits when the process dies may or may not have been done; it raises StoreUnavailable, and since points carry ids
that never change, asking again is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from qdrant_client import models

from hybridtei.errors import StoreAtCapacity, StoreError, StoreUnavailable
from hybridtei.store.base import CollectionSchema, PointId, Selector, selector
from hybridtei.store.collection import check_name, check_names, schema_from_dict, schema_to_dict
from hybridtei.store.packed import format_in, query_packed, uses_multivector
from hybridtei.store.points import batches, check_points
from hybridtei.system import machine
from hybridtei.system.frames import HEADER, frame, unframe

MAX_READ_INLINE = 500  # points: to make models of more would block the event loop


class EmbeddedStore:
    """One folder. A second process that opens it gets a StoreError at its first call."""

    kind = "embedded"

    def __init__(self, path: str, *, timeout_s: float = 30.0) -> None:
        self._owner = ProcessClient(path)
        self._timeout_s = timeout_s
        self._schemas: dict[str, CollectionSchema] = {}

    async def _call(self, call: str, name: str, *arguments: Any) -> Any:
        check_name(name)
        return await self._owner.ask(call, name, *arguments, timeout_s=self._timeout_s)

    async def collections(self) -> list[str]:
        names: list[str] = await self._owner.ask("collections", timeout_s=self._timeout_s)
        return names

    async def describe(self, name: str) -> CollectionSchema | None:
        fields = await self._call("describe", name)
        if fields is None:
            return None
        self._schemas[name] = schema_from_dict(fields)
        return self._schemas[name]

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        await self._call("create", name, schema_to_dict(schema))
        self._schemas[name] = schema

    async def drop(self, name: str) -> None:
        self._schemas.pop(name, None)
        await self._call("drop", name)

    async def upsert(self, name: str, points: Sequence[models.PointStruct]) -> None:
        schema = self._schemas.get(name) or await self.describe(name)
        if schema is None:
            raise StoreError(f"embedded Qdrant: there is no collection {name!r}")
        arrays = await asyncio.to_thread(check_points, points, schema)  # thousands of points would block the event loop
        for batch in batches(arrays):
            await self._call("upsert", name, [_message(point) for point in batch])

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
        if uses_multivector(request) and (packed := await format_in(self, name, self._schemas)) is not None:
            return await query_packed(self, name, request, packed)
        points = await self._call("query", name, _plain(request))
        if len(points) > MAX_READ_INLINE:
            return await asyncio.to_thread(lambda: [_scored(point) for point in points])
        return [_scored(point) for point in points]

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[models.Record]:
        records = await self._call("retrieve", name, list(ids), selector(with_payload), selector(with_vectors))
        return [_record(record) for record in records]

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: models.Filter | None = None,
        with_payload: bool = True,
        with_vectors: Selector = False,
    ) -> tuple[list[models.Record], PointId | None]:
        page = {
            "limit": limit,
            "offset": offset,
            "filter": _plain(scroll_filter),
            "with_payload": with_payload,
            "with_vectors": selector(with_vectors),
        }
        records, following = await self._call("scroll", name, page)
        return [_record(record) for record in records], following

    async def count(self, name: str, count_filter: models.Filter | None = None) -> int:
        count: int = await self._call("count", name, _plain(count_filter))
        return count

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        await self._call("delete", name, list(ids))

    async def optimize(self, name: str) -> None:
        """Merge and index now, however long it takes; other calls wait meanwhile. The process does so by itself when idle."""
        check_name(name)
        await self._owner.ask("optimize", name, timeout_s=None)

    async def close(self) -> None:
        await self._owner.close()


def _plain(model: models.QueryRequest | models.Filter | None) -> Any:
    return model and model.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False)


def _message(point: models.PointStruct) -> list[Any]:
    """[id, vectors, payload] of a checked point."""
    assert isinstance(point.vector, Mapping)
    return [point.id, {name: _numbers(vector) for name, vector in point.vector.items()}, point.payload]


def _numbers(vector: Any) -> Any:
    if isinstance(vector, models.SparseVector):
        return {"indices": vector.indices, "values": vector.values}
    return np.ascontiguousarray(vector)


def _record(message: Sequence[Any]) -> models.Record:
    identity, payload, vectors = message
    return models.Record.model_construct(id=identity, payload=payload, vector=_vectors(vectors))


def _scored(message: Sequence[Any]) -> models.ScoredPoint:
    identity, payload, vectors, version, score = message
    return models.ScoredPoint.model_construct(
        id=identity, payload=payload, vector=_vectors(vectors), version=version, score=score
    )


def _vectors(vectors: Mapping[str, Any] | None) -> Any:
    if vectors is None:
        return None
    return {
        name: models.SparseVector.model_construct(**vector) if isinstance(vector, Mapping) else vector
        for name, vector in vectors.items()
    }


START_S = 60.0
CLOSE_S = 120.0
MAX_WAITING = 1000  # calls, however fast they are: each holds its arguments
NEWEST_SHARE = 0.1  # weight of the newest call in a mean duration


@dataclass(eq=False, slots=True)
class _Call:
    """A call as a frame, and the future of its answer."""

    name: str
    message: bytes
    answer: asyncio.Future[Any]


class ProcessClient:
    """The engine's process and the connection to it. Used from one event loop."""

    command: ClassVar[tuple[str, ...]] = ("-m", "hybridtei.store.embedded_process")

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._folder = os.path.abspath(path)  # the process works elsewhere
        self._clock = clock
        self._starting: asyncio.Task[None] | None = None
        self._waiting: dict[_Call, None] = {}  # calls whose callers wait, in their order, the sent one included
        self._sent: _Call | None = None  # the call that the process executes, whether or not its caller still waits
        self._sent_s = 0.0
        self._mean_s: dict[str, float] = {}  # duration of calls of this name
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return self._process.pid if self._process is not None and self._writer is not None else None

    async def ask(self, call: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The process's answer. Raises StoreError with the process's words, StoreUnavailable if it dies or takes too long, and
        StoreAtCapacity at once if so many calls wait that this one would not be answered within `timeout_s`."""
        self._admit(timeout_s)
        waiting = _Call(call, frame([call, arguments]), asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        try:
            await self._started()  # which has a bound of its own
            async with asyncio.timeout(timeout_s):
                self._send_next()
                return await waiting.answer
        except TimeoutError as error:
            raise StoreUnavailable(
                f"{self.path}: the embedded Qdrant engine has not answered for {timeout_s:g} s: it may be building an index; "
                "try later, or raise `qdrant_timeout`"
            ) from error
        finally:
            del self._waiting[waiting]

    def _admit(self, timeout_s: float | None) -> None:
        """Raises StoreAtCapacity where the calls that wait already will take longer than the bound of this one."""
        waiting = len(self._waiting)
        if timeout_s is None or waiting == 0:
            return
        expected_s = sum(self._mean_s.get(call.name, 0.0) for call in self._waiting)
        if waiting >= MAX_WAITING or expected_s > timeout_s:
            raise StoreAtCapacity(
                f"{self.path}: {waiting} calls wait for the embedded Qdrant engine, about {expected_s:.1f} s of work; one more "
                f"would not be answered within {timeout_s:g} s (qdrant-timeout): try again later"
            )

    def _send_next(self) -> None:
        """Send the call that has waited longest, unless the process executes one."""
        if self._sent is not None or self._writer is None:
            return
        self._sent = next((call for call in self._waiting if not call.answer.done()), None)
        if self._sent is not None:
            self._sent_s = self._clock()
            self._writer.write(self._sent.message)

    def _answered(self, word: str, answer: Any) -> None:
        """Resolve the sent call's future, if its caller still waits, and send the next."""
        call, self._sent = self._sent, None
        assert call is not None
        took_s = self._clock() - self._sent_s
        mean_s = self._mean_s.get(call.name, took_s)
        self._mean_s[call.name] = mean_s + (took_s - mean_s) * NEWEST_SHARE
        if not call.answer.done():
            if word == "done":
                call.answer.set_result(answer)
            else:
                call.answer.set_exception(StoreError(f"embedded Qdrant: {answer}"))
        self._send_next()

    async def close(self) -> None:
        """Waits for the answers of all calls; the process flushes and ends."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        writer, process = self._writer, self._process
        if writer is None or process is None:
            return
        if self._waiting:
            await asyncio.wait([call.answer for call in self._waiting], timeout=CLOSE_S)
        writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._listening is not None:
            await self._listening

    async def _started(self) -> None:
        """Starts the process unless it runs. Callers share one start, which a cancelled caller does not stop."""
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed")
        if self._writer is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
                self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())  # so retrieved
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *machine.python_command(*self.command, self._folder, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                cwd=machine.NEUTRAL,
                env={**machine.child_environment(), "RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            ours.close()
            raise StoreUnavailable(f"{self.path}: the process of the embedded Qdrant engine does not start: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_S):
                word, message = await _receive(reader)
        except (TimeoutError, EOFError, ConnectionError) as error:
            word = "dead"
            message = f"{self.path}: the process of the embedded Qdrant engine ended, or hung, at its start: {error}"
        if word != "ready":
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise StoreError(str(message)) if word == "refused" else StoreUnavailable(str(message))
        self._process, self._writer = process, writer
        self._listening = asyncio.create_task(self._listen(reader, writer, process))

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process
    ) -> None:
        """Resolves calls until the connection ends; then fails the calls that still wait."""
        try:
            while True:
                self._answered(*await _receive(reader))
        except (EOFError, ConnectionError):
            pass
        finally:
            self._writer = self._sent = None
            ended = f"{self.path}: the process of the embedded Qdrant engine has ended; it is started again when asked"
            for call in self._waiting:
                if not call.answer.done():
                    call.answer.set_exception(StoreUnavailable(ended))
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                if not self._closed:
                    process.kill()
            await process.wait()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return unframe(await reader.readexactly(length))
