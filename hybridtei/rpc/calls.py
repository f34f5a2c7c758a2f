"""Which calls may be open, and for how long: a call is authenticated and counted when its headers arrive.

gRPC's own bound, `maximum_concurrent_rpcs`, counts calls without a key too, and never ends one. Here a call without the key is
refused before it counts; services that need no key have bounds of their own; and at a bound, the call ends whose client has
kept it waiting longest.

The handlers of gRPC read the message of a single call before ours is called, so single calls are served as streams of one
message: only what is read here can be given a time limit and a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import grpc
from grpc.aio import EOF

from hybridtei.errors import HybridTeiError
from hybridtei.rpc.errors import Ended, Garbage, refusing

LOOK_SECONDS = 1.0  # between looks for calls that have waited too long
DRAIN_SECONDS = 1.0  # how long a stopping server waits for the next message of an open call

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
        if self._draining:
            deadline = min(deadline, loop.time() + DRAIN_SECONDS)
        one = _Wait(task, deadline, reads)
        self._waits[one] = None
        if self._timer is None:
            self._timer = loop.call_later(self._look_seconds, self._look)
        try:
            return await wait
        except asyncio.CancelledError:
            if one.reason is not None and task.uncancel() == 0:
                raise one.reason from None
            raise
        finally:
            self._waits.pop(one, None)

    def drain(self) -> None:
        """End calls whose clients have nothing to say."""
        self._draining = True
        soon = asyncio.get_running_loop().time() + DRAIN_SECONDS
        for one in self._waits:
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
            if self._draining:
                one.end(Ended(grpc.StatusCode.UNAVAILABLE, "the server stops"))
            else:
                one.end(Ended(grpc.StatusCode.DEADLINE_EXCEEDED, "the client took too long over its next message"))
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
        """One message, as soon as the client has read enough of what came before. Raises Ended."""
        await self.turn(self.context.write(data), self._calls.bounds.idle_seconds, reads=False)


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
