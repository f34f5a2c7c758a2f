"""`grpc.health.v1`: Info and Tokenize always serve; the others, while a model that fits them is well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from hybridtei.batch import Head
from hybridtei.errors import Unhealthy
from hybridtei.rpc.messages import PACKAGE
from hybridtei.server.context import Context
from hybridtei.server.models import Models
from hybridtei.server.routes.ops import capabilities

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

    async def check(self, request: Any, call: Any) -> Any:
        status = await self.status(request.service)
        if status == UNKNOWN:
            await call.abort(grpc.StatusCode.NOT_FOUND, f"no service `{request.service[:200]}`")
        return health_pb2.HealthCheckResponse(status=status)

    async def list(self, _: Any, call: Any) -> Any:
        statuses = {name: health_pb2.HealthCheckResponse(status=await self.status(name)) for name in FITS}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def watch(self, request: Any, call: Any) -> None:
        """Tells the status now, and whenever it has changed."""
        told = None
        while True:
            last = self._ending.is_set()
            status = await self.status(request.service)
            if status != told:
                await call.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOOK_SECONDS)

    def handler(self) -> Any:
        """What a gRPC server is given."""
        read = health_pb2.HealthCheckRequest.FromString
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        calls = {
            "Check": unary(self.check, read, _written),
            "List": unary(self.list, None, _written),  # its request holds nothing
            "Watch": stream(self.watch, read, _written),
        }
        return grpc.method_handlers_generic_handler(NAME, calls)


def _written(message: Any) -> bytes:
    return bytes(message.SerializeToString())
