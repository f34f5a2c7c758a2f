"""The methods of `tei.v1`, and the way from a call to its answer: model, permit, answer, status.

gRPC passes messages as bytes; floats are written into answers from memory. Messages of a bidirectional stream are worked on in
parallel, and answers are sent in the order of the messages.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from hybridtei.errors import NoKey
from hybridtei.observability.tracing import Recorder, arrived
from hybridtei.rpc import answers, messages
from hybridtei.rpc.answers import Decode
from hybridtei.rpc.calls import Endpoint, Exchange, Handle, OpenCalls
from hybridtei.server.context import Context, Reply, headers_of
from hybridtei.server.http.connection import SMALL_BYTES, Unsent
from hybridtei.server.http.security import Authenticator, Role
from hybridtei.server.registry import ANY, CLASSIFY, EMBED, EMBED_SPARSE, RANK, Able, Models

MAX_UNSENT_BYTES = 16_000_000  # of finished answers that wait for the client, or for an earlier answer
DEFAULT_PARALLEL = 1024

BytesAnswer = Callable[[bytes], Coroutine[Any, Any, bytes]]
Send = Callable[[bytes], Awaitable[None]]
Enter = Callable[[], Awaitable[Callable[[], None]]]
BytesEstimate = Callable[[int], int]  # bytes of a message -> bytes of its answer, about


def parallel_requests() -> int:
    """Return the max messages of one stream that are worked on: TEI's variable GRPC_MAX_PARALLEL_STREAM_REQUESTS."""
    text = os.environ.get("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "")
    return max(int(text), 1) if text.isdecimal() else DEFAULT_PARALLEL


class InOrder:
    """One stream. `enter` waits for a permit and returns what releases it. `unsent` counts the answers of all clients."""

    def __init__(
        self,
        answer: BytesAnswer,
        enter: Enter,
        unsent: Unsent,
        *,
        max_tasks: int,
        estimate: BytesEstimate = lambda _: 0,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._answer = answer
        self._enter = enter
        self._estimate = estimate
        self._unsent_of_all = unsent
        self._max_tasks = max_tasks
        self._max_unsent = max_unsent_bytes
        self._tasks: deque[asyncio.Task[bytes]] = deque()
        self._unsent = 0  # bytes of this stream that `_unsent_of_all` counts
        self._ended = False
        self._has_room, self._has_news = asyncio.Event(), asyncio.Event()

    async def run(self, requests: AsyncIterator[bytes], send: Send) -> None:
        """Answer every message. Raises what the first message by place raises, and AnswersUnsent for a message that comes while
        all clients' answers are at their bound and this stream holds none. No task outlives it."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while await self._has_more():
                body = await self._tasks[0]
                await send(body)
                self._tasks.popleft()
                self._count(-len(body))
                self._has_room.set()
            await reader
        finally:
            left = [reader, *self._tasks]
            for task in left:
                task.cancel()
            self._count(-self._unsent)  # before the await: gRPC cancels a call twice, and the second cancellation may end it
            await asyncio.gather(*left, return_exceptions=True)

    def _count(self, size: int) -> None:
        self._unsent += size
        self._unsent_of_all.add(size)

    async def _has_more(self) -> bool:
        while not self._tasks and not self._ended:
            self._has_news.clear()
            await self._has_news.wait()
        return bool(self._tasks)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                while self._tasks and self._is_full:
                    self._has_room.clear()
                    await self._has_room.wait()
                reserved = await self._reserve(len(data))
                self._start(data, reserved, await self._enter())
        finally:
            self._ended = True
            self._has_news.set()

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) >= self._max_tasks or self._unsent >= self._max_unsent or self._unsent_of_all.is_full

    async def _reserve(self, size: int) -> int:
        """Count the estimated answer to a message of `size` bytes as unsent; return the bytes counted."""
        self._unsent_of_all.check()
        estimate = self._estimate(size)
        if estimate <= SMALL_BYTES:
            return 0
        reserved = await self._unsent_of_all.room(estimate)
        self._unsent += reserved
        return reserved

    def _start(self, data: bytes, reserved: int, release: Callable[[], None]) -> None:
        task = asyncio.ensure_future(self._run(data, reserved))
        task.add_done_callback(lambda _: release())  # also if it is cancelled before it begins
        self._tasks.append(task)
        self._has_news.set()

    async def _run(self, data: bytes, reserved: int) -> bytes:
        body = await self._answer(data)
        self._count(len(body) - reserved)
        return body


TOKENIZE_STREAMS = 16  # that tokenise or decode at once; more would fill the queue of callers that cannot wait

Answer = Callable[[Context, Any], Coroutine[Any, Any, Reply]]
Metadata = Sequence[tuple[str, Any]]
Estimate = Callable[[Context, int], int]  # bytes of a message -> bytes of its answer, about


def _constant(_: Context, size: int) -> int:
    return 0


def _vectors_of_tokens(context: Context, size: int) -> int:
    """A float32 vector a token; a text has about as many tokens as bytes at most."""
    spec = context.service.model.spec
    return min(size, spec.max_input_length) * spec.hidden_size * 4


def _times(factor: int) -> Estimate:
    return lambda _, size: factor * size


@dataclass(frozen=True, slots=True)
class Method:
    """How a call is answered, and by which of several models. `permits`: each message of its stream waits for one. `role`: what
    the call's key must allow; None: any key. `estimate`: 0 for an answer that does not grow with its message."""

    answer: Answer
    capability: Sequence[Able] = ANY
    permits: bool = True
    role: Role | None = "infer"
    estimate: Estimate = _constant


METHODS: Mapping[str, Method] = {
    "Info": Method(answers.info, role=None),
    "Embed": Method(answers.embed_dense, EMBED),
    "EmbedSparse": Method(answers.embed_sparse, EMBED_SPARSE),
    "EmbedAll": Method(answers.embed_all, EMBED, estimate=_vectors_of_tokens),
    "Predict": Method(answers.predict, CLASSIFY),
    "PredictPair": Method(answers.predict, CLASSIFY),
    "Rerank": Method(answers.rerank_texts, RANK, estimate=_times(1)),
    "Tokenize": Method(answers.tokenize, permits=False, estimate=_times(20)),
    "Decode": Method(answers.decode, permits=False, estimate=_times(8)),
}


@dataclass(frozen=True, slots=True)
class RpcContext:
    """What all calls share."""

    models: Models
    authenticator: Authenticator
    unsent: Unsent
    recorder: Recorder | None = None
    body_seconds: float = inf  # between two messages that have one answer
    parallel: int = field(default_factory=parallel_requests)
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOKENIZE_STREAMS))

    def authenticate(self, role: Role | None, metadata: Metadata) -> None:
        """Raises NoKey, RoleNeeded."""
        if self.authenticator.keys.is_open:
            return
        header = (_text(metadata, "authorization") or "").encode("utf-8", "replace")
        try:
            self.authenticator.authenticate(self.authenticator.keys.find_in_header(header), role)
        except NoKey:
            raise NoKey("No valid auth token") from None

    def context(self, exchange: Exchange, capability: Sequence[Able]) -> Context:
        """Return the context of the model that answers the call. Raises AnswersUnsent, UnknownModel."""
        self.unsent.check()
        metadata = exchange.context.invocation_metadata() or ()
        arrived(self.recorder, ((name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)))
        return self.models.choose(None, _text(metadata, "model"), capability)


def _text(metadata: Metadata, name: str) -> str | None:
    return next((value for key, value in metadata if key == name and isinstance(value, str)), None)


def tei_endpoints(rpc: RpcContext, calls: OpenCalls) -> dict[str, Endpoint]:
    """Return the endpoints of all services of `tei.proto`, by the full names of their methods."""
    return {
        f"/{service.full_name}/{method.name}": _endpoint(rpc, method, calls)
        for service in messages.services()
        for method in service.methods
    }


def _endpoint(rpc: RpcContext, described: Any, calls: OpenCalls) -> Endpoint:
    method = METHODS[described.name.removesuffix("Stream")]
    decode = partial(messages.parsed, messages.message(described.input_type.name))
    make = _stream_stream if described.server_streaming else _stream_unary if described.client_streaming else _unary_unary
    authenticate = partial(rpc.authenticate, method.role)
    return Endpoint(make(rpc, method, decode), calls, streams=described.server_streaming, authenticate=authenticate)


def _unary_unary(rpc: RpcContext, method: Method, decode: Decode) -> Handle:
    async def handle(exchange: Exchange) -> bytes:
        data = await exchange.read()
        context = rpc.context(exchange, method.capability)
        estimate = method.estimate(context, len(data))
        reserved = 0 if estimate <= SMALL_BYTES else await rpc.unsent.room(estimate)
        try:
            reply = await method.answer(context, decode(data))
        finally:
            rpc.unsent.add(-reserved)
        return await _hand_over(rpc, exchange, reply)

    return handle


def _stream_unary(rpc: RpcContext, method: Method, decode: Decode) -> Handle:
    async def handle(exchange: Exchange) -> bytes:
        context = rpc.context(exchange, method.capability)
        reply = await answers.rerank_stream(context, exchange.messages(rpc.body_seconds), decode)
        return await _hand_over(rpc, exchange, reply)

    return handle


async def _hand_over(rpc: RpcContext, exchange: Exchange, reply: Reply) -> bytes:
    """Send the values of HTTP's `x-…` headers as metadata; return the body, which counts as unsent until it is sent."""
    body = bytes(reply.answer)
    rpc.unsent.add(len(body))
    exchange.hand_over(len(body), partial(rpc.unsent.add, -len(body)))
    if reply.usage is not None:
        metadata = [(name.decode(), value.decode()) for name, value in headers_of(reply.usage)]
        await exchange.context.send_initial_metadata(metadata)
    return body


def _stream_stream(rpc: RpcContext, method: Method, decode: Decode) -> Handle:
    async def handle(exchange: Exchange) -> None:
        context = rpc.context(exchange, method.capability)

        async def answer(data: bytes) -> bytes:
            with context.service.admission.carrying(int(method.permits)):
                return bytes((await method.answer(context, decode(data))).answer)

        enter, max_tasks = (_permit(context), rpc.parallel) if method.permits else (_place(rpc.tokenizing), 1)
        estimate = partial(method.estimate, context)
        stream = InOrder(answer, enter, rpc.unsent, max_tasks=max_tasks, estimate=estimate)
        await stream.run(exchange.messages(), exchange.write)

    return handle


def _permit(context: Context) -> Enter:
    async def enter() -> Callable[[], None]:
        admission = context.service.admission
        permits = await admission.wait(1)
        return lambda: admission.give_back(permits)

    return enter


def _place(semaphore: asyncio.Semaphore) -> Enter:
    async def enter() -> Callable[[], None]:
        await semaphore.acquire()
        return semaphore.release

    return enter
