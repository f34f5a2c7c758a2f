"""`grpc.health.v1`: Info and Tokenize always serve; the others, while a model that fits them is well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from hybridtei.batch import Head
from hybridtei.errors import Ended, Unhealthy
from hybridtei.rpc import messages
from hybridtei.rpc.calls import Exchange, OpenCalls, Served
from hybridtei.rpc.messages import PACKAGE, parsed
from hybridtei.server.api.ops import capabilities
from hybridtei.server.context import Context
from hybridtei.server.registry import Models

NAME = "grpc.health.v1.Health"
LOOK_SECONDS = 5.0  # between two looks for whoever watches
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def _ranks(context: Context) -> bool:
    return context.service.model.spec.kind != "classifier" and "rerank" in capabilities(context.heads)


FITS: Mapping[str, Callable[[Context], bool] | None] = {
    "": None,
    f"{PACKAGE}.Info": None,
    f"{PACKAGE}.Tokenize": None,
    f"{PACKAGE}.Embed": lambda context: context.service.model.spec.kind == "embedding",
    f"{PACKAGE}.Predict": lambda context: Head.SCORES in context.heads,
    f"{PACKAGE}.Rerank": _ranks,
}


class Health:
    """Asks the models when it is asked. `ending`: set when the server drains, which ends watching."""

    def __init__(self, models: Models, ending: asyncio.Event) -> None:
        self._models = models
        self._ending = ending

    async def status(self, name: str) -> int:
        """Of a service by its full name, or of the server by none."""
        if name not in FITS:
            return int(UNKNOWN)
        fits = FITS[name]
        if self._ending.is_set():
            return int(NOT_SERVING)
        if fits is None:
            return int(SERVING)
        for context in self._models.ready:
            if fits(context):
                with suppress(Unhealthy):
                    await context.service.check_health()
                    return int(SERVING)
        return int(NOT_SERVING)

    async def check(self, exchange: Exchange) -> bytes:
        name = await _service_in(exchange)
        status = await self.status(name)
        if status == UNKNOWN:
            raise Ended(grpc.StatusCode.NOT_FOUND, f"no service `{name[:200]}`")
        return _written(health_pb2.HealthCheckResponse(status=status))

    async def list(self, exchange: Exchange) -> bytes:
        await exchange.read()  # its request holds nothing
        statuses = {name: health_pb2.HealthCheckResponse(status=await self.status(name)) for name in FITS}
        return _written(health_pb2.HealthListResponse(statuses=statuses))

    async def watch(self, exchange: Exchange) -> None:
        """Tells the status now, and whenever it has changed."""
        name = await _service_in(exchange)
        told = None
        while True:
            last = self._ending.is_set()
            status = await self.status(name)
            if status != told:
                await exchange.write(_written(health_pb2.HealthCheckResponse(status=status)))
                told = status
            if last:
                return
            with suppress(TimeoutError):
                await exchange.turn(asyncio.wait_for(self._ending.wait(), LOOK_SECONDS), inf)

    def served(self, calls: OpenCalls) -> dict[str, Served]:
        """What serves the methods, by full names. Without a key, as health checks are made."""
        return {
            f"/{NAME}/Check": Served(self.check, calls),
            f"/{NAME}/List": Served(self.list, calls),
            f"/{NAME}/Watch": Served(self.watch, calls, streams=True),
        }


async def _service_in(exchange: Exchange) -> str:
    """The name that a request asks about. Raises Garbage, Ended."""
    return str(parsed(health_pb2.HealthCheckRequest, await exchange.read()).service)


def _written(message: Any) -> bytes:
    return bytes(message.SerializeToString())


REFLECTION = reflection.SERVICE_NAME


def served(calls: OpenCalls) -> dict[str, Served]:
    """What serves the method, by its full name."""
    names = [service.full_name for service in messages.services()]
    servicer = reflection.aio.ReflectionServicer([*names, NAME, REFLECTION], pool=messages.POOL)

    async def handle(exchange: Exchange) -> None:
        async for answer in servicer.ServerReflectionInfo(_requests(exchange), exchange.context):
            await exchange.write(answer.SerializeToString())

    return {f"/{REFLECTION}/ServerReflectionInfo": Served(handle, calls, streams=True)}


async def _requests(exchange: Exchange) -> AsyncIterator[Any]:
    async for data in exchange.messages():
        yield messages.parsed(reflection_pb2.ServerReflectionRequest, data)


for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):  # what reflection tells, besides our own
    messages.POOL.AddSerializedFile(_file.serialized_pb)
