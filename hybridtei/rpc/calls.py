"""Which calls may be open, and for how long: a call is authenticated and counted when its headers arrive.

gRPC's own bound, `maximum_concurrent_rpcs`, also counts calls without a key, and never ends one. Here a call without the key is
refused before it counts, services that need no key have bounds of their own, and at a bound the call ends that has waited
longest for its client.

gRPC's handlers read the message of a unary call before they call ours, so unary calls are served as streams of one message:
only what is read here can have a time limit and a status.

A status waits behind the answers that a client has not read, and gRPC keeps these as long as the connection lives, so the
connection of a client that reads nothing is closed. gRPC reports that a message was read only when all of it was.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from grpc.aio import EOF

from hybridtei.errors import Ended, Garbage, HybridTeiError
from hybridtei.rpc.answers import abort_on_error
from hybridtei.server.http import connection

LOOK_SECONDS = 1.0  # between checks for calls that have waited too long
DRAIN_SECONDS = 1.0  # how long a stopping server waits for the next message of an open call
UNREAD_BYTES_PER_SECOND = 1_000_000  # at least, of a large answer
TOO_SLOW = "the client took too long over its next message"
UNREAD = "the client took too long to read its answer"
OPEN_FILES = "/dev/fd"  # of this process, on Linux and macOS

log = logging.getLogger(__name__)
T = TypeVar("T")
Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of some services' calls: how many are open; seconds until the first message, between two, and in all."""

    calls: int
    first_seconds: float = 10.0
    idle_seconds: float = 60.0
    age_seconds: float = inf


@dataclass(eq=False, slots=True)
class _Wait:
    """A task that waits for its client, its deadline, and why it was ended."""

    task: asyncio.Task[Any]
    deadline: float
    reads: bool
    reason: Ended | None = None

    def end(self, code: grpc.StatusCode, message: str) -> None:
        self.reason = Ended(code, message)
        self.task.cancel()


class OpenCalls:
    """The open calls of some services. Used from the event loop's thread."""

    def __init__(self, bounds: Bounds, *, look_seconds: float = LOOK_SECONDS) -> None:
        self.bounds = bounds
        self._look_seconds = look_seconds
        self._open = 0
        self._waits: dict[_Wait, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False

    def begin(self) -> None:
        """Count the running task as a call until it is done. Raises Ended if there is no room for it."""
        if self._open >= self.bounds.calls:
            self._make_room()
        self._open += 1
        _this_task().add_done_callback(self._close)

    async def wait(self, awaitable: Awaitable[T], deadline: float, *, reads: bool) -> T:
        """Wait for the client until `deadline`, in the loop's time. Raises Ended.

        `reads`: no answer is on its way to the client, so a status would reach it at once.
        """
        task = _this_task()
        if self._draining and reads:
            deadline = min(deadline, _now() + DRAIN_SECONDS)
        wait = self._watch(_Wait(task, deadline, reads))
        try:
            return await awaitable
        except asyncio.CancelledError:
            if wait.reason is not None and task.uncancel() == 0:
                raise wait.reason from None
            raise
        finally:
            self._waits.pop(wait, None)

    def end_after(self, deadline: float, done: Callable[[Ended | None], object]) -> None:
        """End the running task at `deadline`. `done` is called when it ends: with the reason, or None if that was before."""
        wait = self._watch(_Wait(_this_task(), deadline, reads=False))

        def ended(_: Any) -> None:
            self._waits.pop(wait, None)
            done(wait.reason)

        wait.task.add_done_callback(ended)

    def drain(self) -> None:
        """End calls whose clients send nothing within DRAIN_SECONDS."""
        self._draining = True
        soon = _now() + DRAIN_SECONDS
        for wait in self._waits:
            if wait.reads:
                wait.deadline = min(wait.deadline, soon)

    def _watch(self, wait: _Wait) -> _Wait:
        self._waits[wait] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_seconds, self._end_overdue)
        return wait

    def _make_room(self) -> None:
        oldest = next((wait for wait in self._waits if wait.reads), None)
        limit = self.bounds.calls
        if oldest is None:
            raise Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{limit} calls are open already")
        del self._waits[oldest]
        message = f"more than {limit} calls are open, and this one has waited longest for its client"
        oldest.end(grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    def _close(self, _: asyncio.Task[Any]) -> None:
        self._open -= 1

    def _end_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for wait in [wait for wait in self._waits if wait.deadline <= now]:
            del self._waits[wait]
            if wait.reads and self._draining:
                wait.end(grpc.StatusCode.UNAVAILABLE, "the server stops")
            else:
                wait.end(grpc.StatusCode.DEADLINE_EXCEEDED, TOO_SLOW if wait.reads else UNREAD)
        self._timer = loop.call_later(self._look_seconds, self._end_overdue) if self._waits else None


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _now() -> float:
    return asyncio.get_running_loop().time()


class Exchange:
    """One call, as its handler sees it: messages are bytes. `context`: gRPC's own."""

    __slots__ = ("_began", "_calls", "context")

    def __init__(self, calls: OpenCalls, context: Any) -> None:
        self.context = context
        self._calls = calls
        self._began = _now()

    async def wait(self, awaitable: Awaitable[T], seconds: float, *, reads: bool = True) -> T:
        """Wait for the client, at most `seconds`. Raises Ended."""
        deadline = min(_now() + seconds, self._began + self._calls.bounds.age_seconds)
        return await self._calls.wait(awaitable, deadline, reads=reads)

    async def read(self) -> bytes:
        """Return the one message of a unary call. Raises Garbage if the client sends none, Ended."""
        data = await self.wait(self.context.read(), self._calls.bounds.first_seconds)
        if data is EOF:
            raise Garbage("the call ended without a message")
        return bytes(data)

    async def messages(self, idle_seconds: float | None = None) -> AsyncIterator[bytes]:
        """Yield the client's messages. `idle_seconds` replaces the bound between two. Raises Ended."""
        seconds = self._calls.bounds.first_seconds
        while (data := await self.wait(self.context.read(), seconds)) is not EOF:
            seconds = self._calls.bounds.idle_seconds if idle_seconds is None else idle_seconds
            yield data

    async def write(self, data: bytes) -> None:
        """Send one message; return when the client has read enough of it. Raises Ended, and then closes the connection."""
        try:
            await self.wait(self.context.write(data), _unread_seconds(len(data)), reads=False)
        except Ended:
            # Not before gRPC has the call's status: it would report a connection that closes earlier as an error.
            _this_task().add_done_callback(lambda _: self._close())
            raise

    def hand_over(self, size: int, done: Callable[[], object]) -> None:
        """Announce an answer of `size` bytes that the handler returns; `done` is called when it is sent, or never will be."""

        def ended(reason: Ended | None) -> None:
            done()
            if reason is not None:
                self._close()

        self._calls.end_after(_now() + _unread_seconds(size), ended)

    def _close(self) -> None:
        log.warning("%s; the connection is closed", UNREAD)
        asyncio.get_running_loop().run_in_executor(None, close_connection, self.context.peer())


def _unread_seconds(size: int) -> float:
    """How long a client may take to read an answer of `size` bytes."""
    return connection.UNREAD_SECONDS + size / UNREAD_BYTES_PER_SECOND


Handle = Callable[[Exchange], Awaitable[bytes | None]]  # returns the answer of a call that has one


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What serves a method. `authenticate` gets the call's metadata before the call counts, and raises if it is not allowed."""

    handle: Handle
    calls: OpenCalls
    streams: bool = False
    authenticate: Callable[[Any], object] | None = None


class CallTable(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Endpoints by the full names of their methods, such as `/tei.v1.Embed/Embed`."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = {name: (endpoint, _handler(endpoint)) for name, endpoint in endpoints.items()}

    def service(self, details: Any) -> Any:
        """Called by gRPC in the call's own task, once its headers are there; None: there is no such method."""
        if details.method not in self._endpoints:
            return None
        endpoint, handler = self._endpoints[details.method]
        try:
            if endpoint.authenticate is not None:
                endpoint.authenticate(details.invocation_metadata)
            endpoint.calls.begin()
        except HybridTeiError as error:
            return _refusal(error)
        return handler


def _handler(endpoint: Endpoint) -> Any:
    async def handle(_: Any, context: Any) -> bytes | None:
        async with abort_on_error(context):
            return await endpoint.handle(Exchange(endpoint.calls, context))
        return None

    return (grpc.stream_stream_rpc_method_handler if endpoint.streams else grpc.stream_unary_rpc_method_handler)(handle)


def _refusal(error: HybridTeiError) -> Any:
    async def refuse(_: Any, context: Any) -> None:
        async with abort_on_error(context):
            raise error

    return grpc.stream_unary_rpc_method_handler(refuse)


def close_connection(peer: str) -> None:
    """Close the connection from `peer`, as gRPC writes it (`ipv4:127.0.0.1:1234`), which gRPC's API does not offer.

    Takes 3 µs for each open file of the process.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    address = _address(host.strip("[]"), int(port))
    for opened in _connections():
        with suppress(OSError):  # it has no other side, or none any more
            if _address(*opened.getpeername()[:2]) == address:
                opened.shutdown(socket.SHUT_RDWR)  # gRPC notices, and closes its own


def _address(host: str, port: int) -> Address:
    """An IPv4 address that is mapped into IPv6 counts as the IPv4 one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


def _connections() -> Iterator[socket.socket]:
    """Yield the process's TCP sockets, each under a duplicate of its descriptor that is closed afterwards."""
    for name in os.listdir(OPEN_FILES):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            duplicate = socket.socket(fileno=number)
        except OSError:  # another kind of file
            os.close(number)
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate
