"""A model's engine from another process: `RemoteEngine` asks over a socket, `EngineServer` answers.

Many requests run at once, each with a number. A cancelled request is cancelled at the engine, which drops what has not run; so
are all requests of a process that ends. `now_ns` may cross, since the clock is the machine's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hybridtei import errors
from hybridtei.batch import Encoding, Head, Ids, PackedBatch, Padding
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.engine.engine import BatchMetrics, EngineClient
from hybridtei.engine.scheduler import EngineRequest
from hybridtei.errors import BackendError, HybridTeiError, Unhealthy
from hybridtei.observability.metrics import Registry
from hybridtei.outputs import HeadOutputs
from hybridtei.system.frames import PREFIX, decode, encode
from hybridtei.system.machine import LaneKind


@dataclass(frozen=True, slots=True, eq=False)
class RunMessage:
    """An `EngineRequest` on the wire: its encodings end to end, which costs less than one record each."""

    number: int
    heads: frozenset[Head]
    now_ns: int
    input_ids: Ids
    token_type_ids: Ids | None
    lengths: list[int]
    unseen: list[int]
    adapters: list[int]
    shared: list[int]
    routes: list[int]

    @classmethod
    def of(cls, number: int, request: EngineRequest) -> RunMessage:
        encodings = request.encodings
        types = [encoding.token_type_ids for encoding in encodings]
        return cls(
            number,
            request.heads,
            request.added_ns,
            _joined([encoding.input_ids for encoding in encodings]),
            None if all(one is None for one in types) else _joined([_types(encoding) for encoding in encodings]),
            [len(encoding) for encoding in encodings],
            [encoding.unseen for encoding in encodings],
            [encoding.adapter for encoding in encodings],
            [encoding.shared for encoding in encodings],
            [encoding.route for encoding in encodings],
        )

    def encodings(self) -> list[Encoding]:
        """Return the request's encodings; token types of zeros may stand for None, which means the same."""
        ids, types = self.input_ids, self.token_type_ids
        cuts = [slice(*ends) for ends in pairwise(accumulate(self.lengths, initial=0))]
        return [
            Encoding(ids[cut], None if types is None else types[cut], *facts)
            for cut, *facts in zip(cuts, self.unseen, self.adapters, self.shared, self.routes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ProbeMessage:
    """Asks whether the engine is healthy."""

    number: int


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Cancels a request."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class DoneMessage:
    """A request's outputs, and its times summed over its sequences; a probe's has neither."""

    number: int
    outputs: HeadOutputs
    queue_ns: int = 0
    inference_ns: int = 0


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """A request's failure: the name of a class in `errors`, and its message."""

    number: int
    kind: str
    message: str

    @classmethod
    def of(cls, number: int, error: Exception) -> FailedMessage:
        if not isinstance(error, HybridTeiError):
            return cls(number, BackendError.__name__, f"{type(error).__name__}: {error}")
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return cls(number, known.__name__, str(error))

    def error(self) -> HybridTeiError:
        kind: type[HybridTeiError] = getattr(errors, self.kind)
        error = kind.__new__(kind)  # some take no message of their own
        error.args = (self.message,)
        return error


@dataclass(slots=True)
class RemoteBackend:
    """A description of a backend in another process."""

    spec: ModelSpec
    name: str
    dtype: str
    padding: Padding
    busy_tokens: int
    lanes: tuple[LaneKind, ...]
    fills_cores: bool = False
    shares_prefixes: bool = False
    forwards: int = 0

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """See `Backend.forward`."""
        raise BackendError("the model is in another process")

    def enter_lane(self, kind: LaneKind) -> None:
        """See `Backend.enter_lane`: never called."""

    def close(self) -> None:
        """Nothing to give back."""


class RemoteEngine:
    """See `engine.engine.EngineClient`. Its `metrics` stay at 0, since batches are counted where the engine is."""

    def __init__(self, end: socket.socket) -> None:
        self.metrics = BatchMetrics(Registry())
        self._end = end
        self.dead: BackendError | None = None
        self._channel = Channel(self._received, self._cut)
        self._numbers = count()
        self._requests: dict[int, EngineRequest] = {}
        self._closed = False

    @property
    def busy(self) -> bool:
        """No pass runs in this process."""
        return False

    async def start(self) -> None:
        """Open the channel on the running loop."""
        await self._channel.open(self._end)

    async def stop(self, seconds: float | None = None) -> None:
        """Fail what still waits and close the channel."""
        self._fail()
        self._channel.close()

    async def run(self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int) -> EngineRequest:
        """See `Engine.run`. Raises Unhealthy if the engine is gone."""
        request, number = EngineRequest(encodings, heads, now_ns), next(self._numbers)
        await self._ask(RunMessage.of(number, request), request)
        return request

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        await self._ask(ProbeMessage(next(self._numbers)), EngineRequest((), frozenset(), 0))

    async def _ask(self, message: RunMessage | ProbeMessage, request: EngineRequest) -> None:
        if self._closed:
            raise Unhealthy
        request.waiter = asyncio.get_running_loop().create_future()
        self._requests[message.number] = request
        self._channel.send(message)
        try:
            await request.waiter
        except asyncio.CancelledError:
            self._channel.send(CancelMessage(message.number))
            raise
        finally:
            self._requests.pop(message.number, None)
        if request.error is not None:
            raise request.error

    def _received(self, message: DoneMessage | FailedMessage) -> None:
        request = self._requests.get(message.number)
        if request is None:  # its caller has left
            return
        if isinstance(message, FailedMessage):
            request.wake(message.error())
            return
        request.keep(range(len(request.encodings)), message.outputs)
        request.queue_ns, request.inference_ns = message.queue_ns, message.inference_ns
        request.wake()

    def _cut(self) -> None:
        if not self._closed:
            self.dead = BackendError("the connection to the engine is lost")
        self._fail()

    def _fail(self) -> None:
        self._closed = True
        for request in self._requests.values():
            request.wake(Unhealthy())


class EngineServer:
    """Serves one `RemoteEngine`: gives its requests to the engine, and sends the answers back."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._channel = Channel(self._received, self._left)
        self._running: dict[int, asyncio.Task[None]] = {}

    async def open(self, end: socket.socket) -> None:
        await self._channel.open(end)

    def close(self) -> None:
        """Close the channel and cancel its requests."""
        self._channel.close()
        self._left()

    def _received(self, message: RunMessage | ProbeMessage | CancelMessage) -> None:
        if isinstance(message, CancelMessage):
            running = self._running.get(message.number)
            if running is not None:
                running.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._serve(message))
        self._running[message.number] = task
        task.add_done_callback(lambda _: self._running.pop(message.number, None))

    async def _serve(self, message: RunMessage | ProbeMessage) -> None:
        try:
            if isinstance(message, ProbeMessage):
                await self._engine.check_health()
                answer: DoneMessage | FailedMessage = DoneMessage(message.number, HeadOutputs())
            else:
                request = await self._engine.run(message.encodings(), message.heads, message.now_ns)
                answer = DoneMessage(message.number, request.outputs(), request.queue_ns, request.inference_ns)
        except Exception as error:  # any error is answered, since the caller waits
            answer = FailedMessage.of(message.number, error)
        self._channel.send(answer)

    def _left(self) -> None:
        for task in [*self._running.values()]:
            task.cancel()


def _types(encoding: Encoding) -> Ids:
    types = encoding.token_type_ids
    return np.zeros(len(encoding), dtype=np.int64) if types is None else types


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


ROOM_BYTES = 64 * 1024  # frames of more are received into memory of their own
JOIN_BYTES = 16 * 1024  # below, one copy costs less than several buffers to write


class Channel(asyncio.BufferedProtocol):
    """One end of a socket. `received`: called with each value that arrives; `lost`: once, when either end is closed."""

    def __init__(self, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._room = memoryview(bytearray(ROOM_BYTES))
        self._into = self._room  # or the memory of one large frame
        self._filled = 0

    async def open(self, end: socket.socket) -> None:
        """Take over a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, value: Any) -> None:
        """Send a value, unless the other end is gone."""
        if self._transport is None or self._transport.is_closing():
            return
        pieces = encode(value)
        if sum(map(len, pieces)) <= JOIN_BYTES:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        """Close the socket once everything sent is written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._into is not self._room:
            if self._filled == len(self._into):
                frame, self._into, self._filled = self._into, self._room, 0
                self._received(decode(frame))
            return
        at = 0
        while (size := self._size(at)) is not None and size <= self._filled - at:
            frame = memoryview(bytes(self._room[at : at + size]))  # a copy: arrays outlive the room
            at += size
            self._received(decode(frame))
        rest = self._room[at : self._filled]
        if size is not None and size > ROOM_BYTES:
            self._into = memoryview(bytearray(size))
        self._into[: len(rest)] = bytes(rest)
        self._filled = len(rest)

    def _size(self, at: int) -> int | None:
        """Return the size of the frame that begins there, or None while its prefix is incomplete."""
        return int(PREFIX.unpack_from(self._room, at)[0]) if self._filled - at >= PREFIX.size else None
