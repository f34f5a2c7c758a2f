"""Which calls may be open, and for how long: a call is authenticated and counted when its headers arrive.

gRPC's own bound, `maximum_concurrent_rpcs`, counts calls without a key too, and never ends one. Here a call without the key is
refused before it counts; services that need no key have bounds of their own; and at a bound, the call ends whose client has
kept it waiting longest.

The handlers of gRPC read the message of a single call before ours is called, so single calls are served as streams of one
message: only what is read here can be given a time limit and a status.

A status waits behind the answers that a client has not taken, and gRPC keeps these as long as the connection lives, so the
connection of a client that takes nothing is closed. gRPC tells that a message was taken only when all of it was.
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
from hybridtei.rpc.errors import refusing
from hybridtei.server.http import connection

LOOK_SECONDS = 1.0  # between looks for calls that have waited too long
DRAIN_SECONDS = 1.0  # how long a stopping server waits for the next message of an open call
UNREAD_BYTES_PER_SECOND = 1_000_000  # at least, of a large answer
TOO_SLOW = "the client took too long over its next message"
UNREAD = "the client took too long to read its answer"

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the open calls of some services: how many; seconds until the first message, between two, and in all."""

    calls: int
    first_seconds: float = 10.0
    idle_seconds: float = 60.0
    age_seconds: float = inf


@dataclass(eq=False, slots=True)
class _Wait:
    """A task that waits for its client, until when, and why it was ended."""

    task: asyncio.Task[Any]
    deadline: float
    reads: bool
    reason: Ended | None = None

    def end(self, reason: Ended) -> None:
        self.reason = reason
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
        """The running task is a call, until it is done. Raises Ended if there is no room for it."""
        task = asyncio.current_task()
        assert task is not None
        if self._open >= self.bounds.calls:
            self._make_room()
        self._open += 1
        task.add_done_callback(self._close)

    async def turn(self, wait: Awaitable[T], deadline: float, *, reads: bool) -> T:
        """Wait for the client, which should do something by `deadline`, as the loop counts. Raises Ended.

        `reads`: nothing is on its way to the client, so a status would reach it at once.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        if self._draining and reads:
            deadline = min(deadline, loop.time() + DRAIN_SECONDS)
        one = _Wait(task, deadline, reads)
        self._watch(one)
        try:
            return await wait
        except asyncio.CancelledError:
            if one.reason is not None and task.uncancel() == 0:
                raise one.reason from None
            raise
        finally:
            self._waits.pop(one, None)

    def end_after(self, deadline: float, done: Callable[[Ended | None], object]) -> None:
        """End the running task unless it has ended by itself by `deadline`; `done` is told why, then or when it ends."""
        task = asyncio.current_task()
        assert task is not None
        one = _Wait(task, deadline, reads=False)
        self._watch(one)

        def ended(_: Any) -> None:
            self._waits.pop(one, None)
            done(one.reason)

        task.add_done_callback(ended)

    def _watch(self, one: _Wait) -> None:
        self._waits[one] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_seconds, self._look)

    def drain(self) -> None:
        """End calls whose clients have nothing to say."""
        self._draining = True
        soon = asyncio.get_running_loop().time() + DRAIN_SECONDS
        for one in self._waits:
            if one.reads:
                one.deadline = min(one.deadline, soon)

    def _make_room(self) -> None:
        oldest = next((one for one in self._waits if one.reads), None)
        most = self.bounds.calls
        if oldest is None:
            raise Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} calls are open already")
        del self._waits[oldest]
        message = f"more than {most} calls are open, and this one has waited longest for its client"
        oldest.end(Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, message))

    def _close(self, _: asyncio.Task[Any]) -> None:
        self._open -= 1

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for one in [one for one in self._waits if one.deadline <= now]:
            del self._waits[one]
            if not one.reads:
                one.end(Ended(grpc.StatusCode.DEADLINE_EXCEEDED, UNREAD))
            elif self._draining:
                one.end(Ended(grpc.StatusCode.UNAVAILABLE, "the server stops"))
            else:
                one.end(Ended(grpc.StatusCode.DEADLINE_EXCEEDED, TOO_SLOW))
        self._timer = loop.call_later(self._look_seconds, self._look) if self._waits else None


class Exchange:
    """One call, as its handler sees it: messages are bytes. `context`: gRPC's own."""

    __slots__ = ("_began", "_calls", "context")

    def __init__(self, calls: OpenCalls, context: Any) -> None:
        self.context = context
        self._calls = calls
        self._began = asyncio.get_running_loop().time()

    async def turn(self, wait: Awaitable[T], seconds: float, *, reads: bool = True) -> T:
        """Wait for the client, at most so long. Raises Ended."""
        deadline = asyncio.get_running_loop().time() + seconds
        return await self._calls.turn(wait, min(deadline, self._began + self._calls.bounds.age_seconds), reads=reads)

    async def read(self) -> bytes:
        """The one message of a single call. Raises Garbage if the client sends none, Ended."""
        data = await self.turn(self.context.read(), self._calls.bounds.first_seconds)
        if data is EOF:
            raise Garbage("the call ended without a message")
        return bytes(data)

    async def messages(self, idle_seconds: float | None = None) -> AsyncIterator[bytes]:
        """All that the client sends. `idle_seconds`: instead of the bound between two messages. Raises Ended."""
        seconds = self._calls.bounds.first_seconds
        while (data := await self.turn(self.context.read(), seconds)) is not EOF:
            seconds = self._calls.bounds.idle_seconds if idle_seconds is None else idle_seconds
            yield data

    async def write(self, data: bytes) -> None:
        """One message; returns when the client has taken enough of it. Raises Ended, and closes the connection then."""
        try:
            await self.turn(self.context.write(data), _unread_seconds(len(data)), reads=False)
        except Ended:
            self._close_when_done()
            raise

    def hand_over(self, size: int, done: Callable[[], object]) -> None:
        """The handler is about to return an answer of `size` bytes; `done` is called when it is sent, or never will be."""

        def ended(reason: Ended | None) -> None:
            done()
            if reason is not None:
                self._close()

        self._calls.end_after(asyncio.get_running_loop().time() + _unread_seconds(size), ended)

    def _close_when_done(self) -> None:
        """Close the connection once gRPC has the call's status: it would report a connection that closes before as an error."""
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._close())

    def _close(self) -> None:
        log.warning("%s; the connection is closed", UNREAD)
        asyncio.get_running_loop().run_in_executor(None, close_connection, self.context.peer())


def _unread_seconds(size: int) -> float:
    """That a client may take over an answer of so many bytes."""
    return connection.UNREAD_SECONDS + size / UNREAD_BYTES_PER_SECOND


Handle = Callable[[Exchange], Awaitable[bytes | None]]  # what it returns is the answer of a call that has one


@dataclass(frozen=True, slots=True)
class Served:
    """What serves a method. `authenticate`: called with a call's metadata before it counts; raises if it may not be made."""

    handle: Handle
    calls: OpenCalls
    streams: bool = False
    authenticate: Callable[[Any], object] | None = None


class CallTable(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Methods by their full names, such as `/tei.v1.Embed/Embed`."""

    def __init__(self, served: Mapping[str, Served]) -> None:
        self._served = {name: (one, _handler(one)) for name, one in served.items()}

    def service(self, details: Any) -> Any:
        """Called by gRPC in the call's own task, once its headers are there; None: there is no such method."""
        if details.method not in self._served:
            return None
        one, handler = self._served[details.method]
        try:
            if one.authenticate is not None:
                one.authenticate(details.invocation_metadata)
            one.calls.begin()
        except HybridTeiError as error:
            return _refusal(error)
        return handler


def _handler(one: Served) -> Any:
    async def handle(_: Any, context: Any) -> bytes | None:
        async with refusing(context):
            return await one.handle(Exchange(one.calls, context))
        return None

    return (grpc.stream_stream_rpc_method_handler if one.streams else grpc.stream_unary_rpc_method_handler)(handle)


def _refusal(error: HybridTeiError) -> Any:
    async def refuse(_: Any, context: Any) -> None:
        async with refusing(context):
            raise error

    return grpc.stream_unary_rpc_method_handler(refuse)


OPEN_FILES = "/dev/fd"  # of this process, on Linux and macOS
Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def close_connection(peer: str) -> None:
    """Close the connection from `peer`, as gRPC writes it (`ipv4:127.0.0.1:1234`). It takes 3 µs for each file that is open."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    wanted = _address(host.strip("[]"), int(port))
    for one in _connections():
        with suppress(OSError):  # it has no other side, or none any more
            if _address(*one.getpeername()[:2]) == wanted:
                one.shutdown(socket.SHUT_RDWR)  # gRPC notices, and closes its own


def _address(host: str, port: int) -> Address:
    """What IPv6 calls an address of IPv4 is that address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


def _connections() -> Iterator[socket.socket]:
    """The process's sockets, each under a number that is ours while it is looked at."""
    for name in os.listdir(OPEN_FILES):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=number)
        except OSError:  # another kind of file
            os.close(number)
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield one
