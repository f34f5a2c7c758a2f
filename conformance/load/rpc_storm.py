"""gRPC streams that are cancelled with messages in the works. Wants the extra `grpc`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from hybridtei.rpc import messages

CHANNELS = 8
METHOD = "/tei.v1.Embed/EmbedStream"


async def cancelled_streams(port: int, streams: Sequence[Sequence[str]], hold_seconds: float) -> int:
    """Streams of `EmbedStream`, all texts of each sent at once, cancelled after a moment; -> how many had ended before."""
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for _ in range(min(CHANNELS, len(streams)))]
    try:
        return sum(
            await asyncio.gather(
                *(_cancelled(channels[place % len(channels)], texts, hold_seconds) for place, texts in enumerate(streams))
            )
        )
    finally:
        for channel in channels:
            await channel.close()


async def _cancelled(channel: grpc.aio.Channel, texts: Sequence[str], hold_seconds: float) -> bool:
    async def given() -> AsyncIterator[bytes]:
        for text in texts:
            yield messages.message("EmbedRequest")(inputs=text, truncate=True).SerializeToString()

    call = channel.stream_stream(METHOD)(given())
    reading = asyncio.ensure_future(_read(call))
    await asyncio.wait([reading], timeout=hold_seconds)
    call.cancel()
    reading.cancel()
    ended = await asyncio.gather(reading, return_exceptions=True)
    return not isinstance(ended[0], BaseException)


async def _read(call: grpc.aio.StreamStreamCall) -> None:
    async for _ in call:
        pass
