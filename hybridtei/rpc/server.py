"""The gRPC server beside the HTTP server: listen, answer, drain; with `grpc.health.v1` and reflection, which need no key.

`grpc.aio` takes the loop that runs when `bind` is called, which is uvloop's under uvicorn. Health: Info and Tokenize always
serve; the others, while a model with their capability is healthy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from hybridtei.batch import Head
from hybridtei.config import ServerConfig
from hybridtei.errors import Ended, Unhealthy
from hybridtei.observability.tracing import Recorder
from hybridtei.rpc.calls import Bounds, CallTable, Endpoint, Exchange, OpenCalls
from hybridtei.rpc.messages import PACKAGE, POOL, parsed, services
from hybridtei.rpc.services import RpcContext, tei_endpoints
from hybridtei.server.api.ops import capabilities
from hybridtei.server.context import Context
from hybridtei.server.http.connection import Unsent
from hybridtei.server.http.security import Authenticator, Certificate
from hybridtei.server.registry import Models

log = logging.getLogger(__name__)

MAX_CALLS = 2048  # of `tei.v1` that are open at once
IDLE_SECONDS = 600.0  # between two messages of a stream
HOUR_MS = 3_600_000
# Services that need no key. The longest call of health is `Watch`, which clients begin anew.
HEALTH_BOUNDS, REFLECTION_BOUNDS = Bounds(256, age_seconds=3600.0), Bounds(64, age_seconds=600.0)
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # two servers must not share a port
    ("grpc.max_concurrent_streams", MAX_CALLS),  # of a connection
    ("grpc.max_connection_idle_ms", HOUR_MS // 12),  # without a call; clients connect again when they have one
    ("grpc.max_connection_age_ms", 12 * HOUR_MS),
    ("grpc.max_connection_age_grace_ms", 12 * HOUR_MS),  # for the calls that are open then
    ("grpc.keepalive_time_ms", 60_000),  # finds clients that are gone or read nothing
    ("grpc.keepalive_timeout_ms", 20_000),
]


class RpcServer:
    """Serves all models of a process on `grpc_port`."""

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        recorder: Recorder | None,
        authenticator: Authenticator,
        *,
        unsent: Unsent,
        certificate: Certificate | None = None,
    ) -> None:
        calls = Bounds(MAX_CALLS, config.body_timeout or inf, IDLE_SECONDS)
        self.port = 0  # known once it listens
        self._models = models
        self._config = config
        self._recorder = recorder
        self._authenticator = authenticator
        self._unsent = unsent
        self._certificate = certificate
        self._calls = OpenCalls(calls), OpenCalls(HEALTH_BOUNDS), OpenCalls(REFLECTION_BOUNDS)
        self._server: Any = None
        self._ending: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def bind(self) -> None:
        """Take the port. Raises OSError."""
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", self._config.payload_limit),
            ("grpc.max_allowed_incoming_connections", self._config.max_connections),
        ]
        server = grpc.aio.server(options=options)
        address = _address(self._config.hostname, self._config.grpc_port or 0)
        try:
            self.port = _listen(server, address, self._certificate)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise OSError(f"cannot listen on {address} (gRPC)")
        self._ending = asyncio.Event()
        server.add_generic_rpc_handlers((self._table(self._ending),))
        self._server, self._loop = server, asyncio.get_running_loop()

    def _table(self, ending: asyncio.Event) -> CallTable:
        tei, checks, reflections = self._calls
        rpc = RpcContext(self._models, self._authenticator, self._unsent, self._recorder, tei.bounds.first_seconds)
        endpoints = tei_endpoints(rpc, tei) | Health(self._models, ending).endpoints(checks)
        return CallTable(endpoints | reflection_endpoints(reflections))

    async def start(self) -> None:
        """Answer calls. Raises OSError."""
        if self._server is None:
            await self.bind()
        await self._server.start()
        log.info("Starting gRPC server: %s", _address(self._config.hostname, self.port))

    def drain(self) -> None:
        """Refuse new calls and let open ones end, for `drain_seconds` at most; return at once."""
        if self._draining is None and self._server is not None and self._ending is not None:
            self._ending.set()
            for calls in self._calls:
                calls.drain()
            self._draining = asyncio.ensure_future(self._server.stop(self._config.drain_seconds))

    def hurry(self) -> None:
        """End the calls that are still open. To be called from a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_off)

    def _cut_off(self) -> None:
        self._cutting = asyncio.ensure_future(self._server.stop(None))  # the drain that waits ends with it

    async def stop(self) -> None:
        """Drain, and wait until it is done."""
        self.drain()
        if self._draining is not None:
            await self._draining


def _listen(server: Any, address: str, certificate: Certificate | None) -> int:
    """Return the port; 0 or RuntimeError where there is none."""
    if certificate is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _credentials(certificate)))


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Give each connection the certificate that was read last; gRPC asks from a thread of its own."""
    used = certificate.pair

    def current() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if certificate.pair is used:
            return None
        used = certificate.pair
        return grpc.ssl_server_certificate_configuration([used])

    return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([used]), current)


def _address(hostname: str, port: int) -> str:
    return f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"


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
