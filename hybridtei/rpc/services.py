"""The methods of `tei.v1`, and the one way from a call to its answer: model, permit, answer, status.

Messages pass gRPC as bytes, and floats are written from memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from litestar.exceptions import NotAuthorizedException

from hybridtei.errors import NoKey
from hybridtei.observability.tracing import Recorder, arrived
from hybridtei.rpc import answers, messages
from hybridtei.rpc.calls import Exchange, Handle, OpenCalls, Served
from hybridtei.rpc.stream import Enter, InOrder, parallel_requests
from hybridtei.server import registry as jobs
from hybridtei.server.context import Context, Reply, headers_of
from hybridtei.server.http.connection import SMALL_BYTES, Unsent
from hybridtei.server.http.security import Authenticator, Role
from hybridtei.server.registry import Able, Models

ASIDE_STREAMS = 16  # streams whose texts are tokenised at once; more would fill the queue of those who cannot wait

Answer = Callable[[Context, Any], Coroutine[Any, Any, Reply]]
Decode = Callable[[bytes], Any]
Metadata = Sequence[tuple[str, Any]]
AnswerBytes = Callable[[Context, int], int]  # bytes of a message -> bytes of its answer, about


def _small(_: Context, size: int) -> int:
    """An answer that does not grow with its message."""
    return 0


def _tokens(context: Context, size: int) -> int:
    """A vector of float32 a token; a text has no more tokens than bytes, about."""
    spec = context.service.model.spec
    return min(size, spec.max_input_length) * spec.hidden_size * 4


def _times(factor: int) -> AnswerBytes:
    return lambda _, size: factor * size


@dataclass(frozen=True, slots=True)
class Method:
    """What answers a call, and which of several models. `permits`: a message of its stream waits for one. `role`: that the
    call's key should have; None: any key will do. `size`: of its answer."""

    answer: Answer
    job: Sequence[Able] = jobs.ANY
    permits: bool = True
    role: Role | None = "infer"
    size: AnswerBytes = _small


METHODS: Mapping[str, Method] = {
    "Info": Method(answers.info, role=None),
    "Embed": Method(answers.embed, jobs.EMBED),
    "EmbedSparse": Method(answers.embed_sparse, jobs.EMBED_SPARSE),
    "EmbedAll": Method(answers.embed_all, jobs.EMBED, size=_tokens),
    "Predict": Method(answers.predict, jobs.CLASSIFY),
    "PredictPair": Method(answers.predict_pair, jobs.CLASSIFY),
    "Rerank": Method(answers.rerank, jobs.RANK, size=_times(1)),
    "Tokenize": Method(answers.tokenize, permits=False, size=_times(20)),
    "Decode": Method(answers.decode, permits=False, size=_times(8)),
}


@dataclass(frozen=True, slots=True)
class Front:
    """What all calls share."""

    models: Models
    authenticator: Authenticator
    unsent: Unsent
    recorder: Recorder | None = None
    body_seconds: float = inf  # between two messages that have one answer
    parallel: int = field(default_factory=parallel_requests)
    beside: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASIDE_STREAMS))

    def authenticate(self, role: Role | None, sent: Metadata) -> None:
        """Raises NoKey, RoleNeeded."""
        if self.authenticator.keys.is_open:
            return
        given = (_text(sent, "authorization") or "").encode("utf-8", "replace")
        try:
            self.authenticator.authenticate(self.authenticator.keys.find_in_header(given), role)
        except NotAuthorizedException:
            raise NoKey("No valid auth token") from None

    def context(self, exchange: Exchange, job: Sequence[Able]) -> Context:
        """Of the model that is to answer. Raises AnswersUnsent, UnknownModel."""
        self.unsent.check()
        sent = exchange.context.invocation_metadata() or ()
        arrived(self.recorder, ((name.encode(), value.encode()) for name, value in sent if isinstance(value, str)))
        return self.models.choose(None, _text(sent, "model"), job)


def _text(sent: Metadata, name: str) -> str | None:
    return next((value for key, value in sent if key == name and isinstance(value, str)), None)


def served(front: Front, calls: OpenCalls) -> dict[str, Served]:
    """What serves the methods of all services, by full names."""
    return {
        f"/{service.full_name}/{method.name}": _served(front, method, calls)
        for service in messages.services()
        for method in service.methods
    }


def _served(front: Front, described: Any, calls: OpenCalls) -> Served:
    method, decode = (
        METHODS[described.name.removesuffix("Stream")],
        partial(messages.parsed, messages.message(described.input_type.name)),
    )
    form = _streamed if described.server_streaming else _collected if described.client_streaming else _single
    handle = form(front, method, decode)
    return Served(handle, calls, streams=described.server_streaming, authenticate=partial(front.authenticate, method.role))


def _single(front: Front, method: Method, decode: Decode) -> Handle:
    async def handle(exchange: Exchange) -> bytes:
        data = await exchange.read()
        context = front.context(exchange, method.job)
        estimate = method.size(context, len(data))
        reserved = 0 if estimate <= SMALL_BYTES else await front.unsent.room(estimate)
        try:
            reply = await method.answer(context, decode(data))
        finally:
            front.unsent.add(-reserved)
        return await _sent(front, exchange, reply)

    return handle


def _collected(front: Front, method: Method, decode: Decode) -> Handle:
    async def handle(exchange: Exchange) -> bytes:
        context = front.context(exchange, method.job)
        reply = await answers.rerank_stream(context, exchange.messages(front.body_seconds), decode)
        return await _sent(front, exchange, reply)

    return handle


async def _sent(front: Front, exchange: Exchange, reply: Reply) -> bytes:
    """The body, which is counted until it is sent, once the values of HTTP's `x-…` headers are on their way."""
    body = bytes(reply.answer)
    front.unsent.add(len(body))
    exchange.hand_over(len(body), partial(front.unsent.add, -len(body)))
    if reply.usage is not None:
        metadata = [(name.decode(), value.decode()) for name, value in headers_of(reply.usage)]
        await exchange.context.send_initial_metadata(metadata)
    return body


def _streamed(front: Front, method: Method, decode: Decode) -> Handle:
    async def handle(exchange: Exchange) -> None:
        context = front.context(exchange, method.job)

        async def answer(data: bytes) -> bytes:
            with context.service.admission.carrying(int(method.permits)):
                return bytes((await method.answer(context, decode(data))).answer)

        enter, most = (_permit(context), front.parallel) if method.permits else (_place(front.beside), 1)
        stream = InOrder(answer, enter, front.unsent, most=most, estimate=partial(method.size, context))
        await stream.run(exchange.messages(), exchange.write)

    return handle


def _permit(context: Context) -> Enter:
    async def enter() -> Callable[[], None]:
        admission = context.service.admission
        permits = await admission.wait(1)
        return lambda: admission.give_back(permits)

    return enter


def _place(beside: asyncio.Semaphore) -> Enter:
    async def enter() -> Callable[[], None]:
        await beside.acquire()
        return beside.release

    return enter
