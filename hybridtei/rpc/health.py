"""`grpc.health.v1` and reflection, which need no key.

Health: Info and Tokenize always serve; the others, while a model with their capability is healthy.
"""

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
from hybridtei.rpc.calls import Endpoint, Exchange, OpenCalls
from hybridtei.rpc.messages import PACKAGE, POOL, parsed, services
from hybridtei.server.api.ops import capabilities
from hybridtei.server.context import Context
from hybridtei.server.registry import Models

HEALTH, REFLECTION = "grpc.health.v1.Health", reflection.SERVICE_NAME
WATCH_SECONDS = 5.0  # between two checks of a watched service
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def _ranks(context: Context) -> bool:
    return context.service.model.spec.kind != "classifier" and "rerank" in capabilities(context.heads)


# Service -> whether a model serves it; None: no model is needed.
FITS: Mapping[str, Callable[[Context], bool] | None] = {
    "": None,
    f"{PACKAGE}.Info": None,
    f"{PACKAGE}.Tokenize": None,
    f"{PACKAGE}.Embed": lambda context: context.service.model.spec.kind == "embedding",
    f"{PACKAGE}.Predict": lambda context: Head.SCORES in context.heads,
    f"{PACKAGE}.Rerank": _ranks,
}


class Health:
    """Checks the models at each request. `ending`: set when the server drains, which ends watching."""

    def __init__(self, models: Models, ending: asyncio.Event) -> None:
        self._models = models
        self._ending = ending

    async def status(self, name: str) -> int:
        """Return the status of a service by its full name, or of the server by ""."""
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
        name = await _service_name(exchange)
        status = await self.status(name)
        if status == UNKNOWN:
            raise Ended(grpc.StatusCode.NOT_FOUND, f"no service `{name[:200]}`")
        return _response(status)

    async def list(self, exchange: Exchange) -> bytes:
        await exchange.read()  # an empty message
        statuses = {name: health_pb2.HealthCheckResponse(status=await self.status(name)) for name in FITS}
        return bytes(health_pb2.HealthListResponse(statuses=statuses).SerializeToString())

    async def watch(self, exchange: Exchange) -> None:
        """Send the status now, and whenever it has changed."""
        name = await _service_name(exchange)
        sent = None
        while True:
            last = self._ending.is_set()
            status = await self.status(name)
            if status != sent:
                await exchange.write(_response(status))
                sent = status
            if last:
                return
            with suppress(TimeoutError):
                await exchange.wait(asyncio.wait_for(self._ending.wait(), WATCH_SECONDS), inf)

    def endpoints(self, calls: OpenCalls) -> dict[str, Endpoint]:
        """Return the endpoints by the full names of their methods."""
        return {
            f"/{HEALTH}/Check": Endpoint(self.check, calls),
            f"/{HEALTH}/List": Endpoint(self.list, calls),
            f"/{HEALTH}/Watch": Endpoint(self.watch, calls, streams=True),
        }


async def _service_name(exchange: Exchange) -> str:
    return str(parsed(health_pb2.HealthCheckRequest, await exchange.read()).service)


def _response(status: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())


def reflection_endpoints(calls: OpenCalls) -> dict[str, Endpoint]:
    """Return the endpoint of reflection by its method's full name."""
    names = [service.full_name for service in services()]
    servicer = reflection.aio.ReflectionServicer([*names, HEALTH, REFLECTION], pool=POOL)

    async def requests(exchange: Exchange) -> AsyncIterator[Any]:
        async for data in exchange.messages():
            yield parsed(reflection_pb2.ServerReflectionRequest, data)

    async def handle(exchange: Exchange) -> None:
        async for answer in servicer.ServerReflectionInfo(requests(exchange), exchange.context):
            await exchange.write(answer.SerializeToString())

    return {f"/{REFLECTION}/ServerReflectionInfo": Endpoint(handle, calls, streams=True)}


for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):  # what reflection describes, besides `tei.proto`
    POOL.AddSerializedFile(_file.serialized_pb)
