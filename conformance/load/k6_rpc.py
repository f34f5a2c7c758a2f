"""The gRPC half of `k6_shape`: `Embed` at a rate, and one `EmbedStream`. Wants the extra `grpc`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import grpc

from hybridtei.rpc import messages

EMBED, STREAM = "/tei.v1.Embed/Embed", "/tei.v1.Embed/EmbedStream"

Ask = Callable[[], Awaitable[Mapping[str, str]]]


def _message(text: str) -> bytes:
    data: bytes = messages.message("EmbedRequest")(inputs=text, truncate=True).SerializeToString()
    return data


@asynccontextmanager
async def over_grpc(port: int, text: str) -> AsyncIterator[Callable[[], Awaitable[Ask]]]:
    """Clients that share a channel; each gives the times in the metadata of its answer. Raises grpc.aio.AioRpcError."""
    data = _message(text)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        embed = channel.unary_unary(EMBED)

        async def ask() -> Mapping[str, str]:
            call = embed(data)
            told = {key: value for key, value in await call.initial_metadata() if isinstance(value, str)}
            await call
            return told

        async def make() -> Ask:
            return ask

        yield make


async def one_stream(port: int, text: str, number: int) -> int:
    """Send so many messages at once; -> how many answers came."""
    data = _message(text)

    async def given() -> AsyncIterator[bytes]:
        for _ in range(number):
            yield data

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return sum([1 async for _ in channel.stream_stream(STREAM)(given())])
