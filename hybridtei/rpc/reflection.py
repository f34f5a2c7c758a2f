"""`grpc.reflection.v1alpha`: the messages of `tei.proto` for clients that have no copy of it. It needs no key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from hybridtei.rpc import health, messages
from hybridtei.rpc.calls import Exchange, OpenCalls, Served

NAME = reflection.SERVICE_NAME


def served(calls: OpenCalls) -> dict[str, Served]:
    """What serves the method, by its full name."""
    names = [service.full_name for service in messages.services()]
    servicer = reflection.aio.ReflectionServicer([*names, health.NAME, NAME], pool=messages.POOL)

    async def handle(exchange: Exchange) -> None:
        async for answer in servicer.ServerReflectionInfo(_requests(exchange), exchange.context):
            await exchange.write(answer.SerializeToString())

    return {f"/{NAME}/ServerReflectionInfo": Served(handle, calls, streams=True)}


async def _requests(exchange: Exchange) -> AsyncIterator[Any]:
    async for data in exchange.messages():
        yield messages.parsed(reflection_pb2.ServerReflectionRequest, data)


for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):  # what reflection tells, besides our own
    messages.POOL.AddSerializedFile(_file.serialized_pb)
