"""The table of calls, and the one way from a call to its answer: key, model, permit, answer, status.

Messages pass gRPC as bytes: a call without the key is not decoded, and floats are written from memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from litestar.exceptions import NotAuthorizedException

from hybridtei.rpc import answers, messages, rerank
from hybridtei.rpc.admission import carrying
from hybridtei.rpc.errors import Garbage, NoKey, refusing
from hybridtei.rpc.stream import Enter, InOrder, parallel_requests
from hybridtei.server import jobs
from hybridtei.server.auth import Door
from hybridtei.server.context import Context, Reply
from hybridtei.server.jobs import Able
from hybridtei.server.models import Models
from hybridtei.server.tracing import Recorder, arrived

ASIDE_STREAMS = 16  # streams whose texts are tokenised at once; more would fill the queue of those who cannot wait

Answer = Callable[[Context, Any], Coroutine[Any, Any, Reply]]


@dataclass(frozen=True, slots=True)
class Method:
    """What answers a call, and which of several models. `permits`: a message of its stream waits for one."""

    answer: Answer
    job: Sequence[Able] = jobs.ANY
    permits: bool = True


METHODS: Mapping[str, Method] = {
    "Info": Method(answers.info),
    "Embed": Method(answers.embed, jobs.EMBED),
    "EmbedSparse": Method(answers.embed_sparse, jobs.EMBED_SPARSE),
    "EmbedAll": Method(answers.embed_all, jobs.EMBED),
    "Predict": Method(answers.predict, jobs.CLASSIFY),
    "PredictPair": Method(answers.predict_pair, jobs.CLASSIFY),
    "Rerank": Method(rerank.rerank, jobs.RANK),
    "Tokenize": Method(answers.tokenize, permits=False),
    "Decode": Method(answers.decode, permits=False),
}


@dataclass(frozen=True, slots=True)
class Front:
    """What all calls share."""

    models: Models
    door: Door
    recorder: Recorder | None = None
    parallel: int = field(default_factory=parallel_requests)
    beside: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASIDE_STREAMS))

    def context(self, call: Any, job: Sequence[Able]) -> Context:
        """Of the model that is to answer. Raises NoKey before all else, UnknownModel."""
        sent = call.invocation_metadata() or ()
        if not self.door.keys.is_open:
            given = (_text(sent, "authorization") or "").encode("utf-8", "replace")
            try:
                self.door.let_in(self.door.keys.owner_of_header(given))
            except NotAuthorizedException:
                raise NoKey("No valid auth token") from None
        arrived(self.recorder, ((name.encode(), value.encode()) for name, value in sent if isinstance(value, str)))
        return self.models.choose(None, _text(sent, "model"), job)


def _text(sent: Sequence[tuple[str, Any]], name: str) -> str | None:
    return next((value for key, value in sent if key == name and isinstance(value, str)), None)


def handlers(front: Front) -> list[Any]:
    """What a gRPC server is given, one a service."""
    return [
        grpc.method_handlers_generic_handler(
            service.full_name, {method.name: _handler(front, method) for method in service.methods}
        )
        for service in messages.services()
    ]


def _handler(front: Front, described: Any) -> Any:
    method, decode = METHODS[described.name.removesuffix("Stream")], _decoder(described.input_type.name)
    if described.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_streamed(front, method, decode))
    if described.client_streaming:
        return grpc.stream_unary_rpc_method_handler(_collected(front, method, decode))
    return grpc.unary_unary_rpc_method_handler(_single(front, method, decode))


def _decoder(name: str) -> Callable[[bytes], Any]:
    parse = messages.message(name).FromString

    def decode(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise Garbage(f"not a {messages.PACKAGE}.{name}: {error}") from None

    return decode


def _single(front: Front, method: Method, decode: Callable[[bytes], Any]) -> Any:
    async def handle(data: bytes, call: Any) -> bytes | None:
        async with refusing(call):
            context = front.context(call, method.job)
            return await _sent(call, await method.answer(context, decode(data)))
        return None

    return handle


def _collected(front: Front, method: Method, decode: Callable[[bytes], Any]) -> Any:
    async def handle(requests: AsyncIterator[bytes], call: Any) -> bytes | None:
        async with refusing(call):
            context = front.context(call, method.job)
            return await _sent(call, await rerank.rerank_stream(context, requests, decode))
        return None

    return handle


async def _sent(call: Any, reply: Reply) -> bytes:
    """The body, once the values of HTTP's `x-…` headers are on their way."""
    if reply.usage is not None:
        await call.send_initial_metadata([(name.decode(), value.decode()) for name, value in reply.usage.headers()])
    return bytes(reply.answer)


def _streamed(front: Front, method: Method, decode: Callable[[bytes], Any]) -> Any:
    async def handle(requests: AsyncIterator[bytes], call: Any) -> None:
        async with refusing(call):
            context = front.context(call, method.job)

            async def answer(data: bytes) -> bytes:
                with carrying(int(method.permits)):
                    return bytes((await method.answer(context, decode(data))).answer)

            if method.permits:
                await InOrder(answer, _permit(context), most=front.parallel).run(requests, call.write)
            else:
                await InOrder(answer, _place(front.beside), most=1).run(requests, call.write)

    return handle


def _permit(context: Context) -> Enter:
    async def enter() -> Callable[[], None]:
        admission = rerank.admission_of(context)
        permits = await admission.wait(1)
        return lambda: admission.give_back(permits)

    return enter


def _place(beside: asyncio.Semaphore) -> Enter:
    async def enter() -> Callable[[], None]:
        await beside.acquire()
        return beside.release

    return enter
