"""The gRPC server beside the HTTP server: listen, answer, drain. It includes grpcio's health and
reflection, without a key.

`grpc.aio` uses the event loop that runs when `bind` is called: uvicorn's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, text_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from hybridtei.batch import Head
from hybridtei.config import ServerConfig
from hybridtei.errors import Unhealthy
from hybridtei.limits import MAX_INSIDE_BYTES, Bound
from hybridtei.server.answers import answers_unsent
from hybridtei.server.api.ops import capabilities
from hybridtei.server.context import Context
from hybridtei.server.grpc.calls import MAX_CALLS, Gate, Servicer, too_large_messages
from hybridtei.server.grpc.messages import PACKAGE, POOL, services
from hybridtei.server.http.security import Certificate, Keyring
from hybridtei.server.models import Models
from hybridtei.system.tracing import Recorder

log = logging.getLogger(__name__)

MINUTE_MS = 60_000
# TEI's bound
MESSAGE_BYTES = 4_194_304
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # Of one connection
    ("grpc.max_concurrent_streams", MAX_CALLS),
    # Clients reconnect for the next call
    ("grpc.max_connection_idle_ms", 5 * MINUTE_MS),
    ("grpc.max_connection_age_ms", 30 * MINUTE_MS),
    # For the calls open at that time
    ("grpc.max_connection_age_grace_ms", 60 * MINUTE_MS),
    # Pings find dead clients
    ("grpc.keepalive_time_ms", MINUTE_MS),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may ping as often as they like, as TEI lets them
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


class RpcServer:
    """Serves the models of the process on `grpc_port`."""

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        recorder: Recorder | None,
        keys: Keyring,
        *,
        certificate: Certificate | None = None,
    ) -> None:
        # Set by `bind`
        self.port = 0
        # Separate from HTTP's, so that unread gRPC answers do not block HTTP
        self.unsent = Bound(config.max_unsent_bytes, answers_unsent)
        self._config = config
        self._certificate = certificate
        inside = Bound(MAX_INSIDE_BYTES, too_large_messages)
        self._servicer = Servicer(models, self.unsent, inside, recorder, keys)
        self._health = Health(models)
        self._gate = Gate(keys, config.body_timeout or inf, inside)
        self._server: Any = None
        self._looking: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def bind(self) -> None:
        """Take the port. Raises OSError."""
        options = [
            *OPTIONS,
            ("grpc.so_reuseport", int(self._config.reuse_port)),
            ("grpc.max_receive_message_length", max(self._config.payload_limit, MESSAGE_BYTES)),
            ("grpc.max_allowed_incoming_connections", self._config.max_connections),
        ]
        server = grpc.aio.server(interceptors=[self._gate], options=options)
        server.add_generic_rpc_handlers([*self._servicer.handlers(), *reflection_handlers()])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = _address(self._config.hostname, self._config.grpc_port or 0)
        with suppress(RuntimeError):
            if self._certificate is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, _credentials(self._certificate))
        if not self.port:
            raise OSError(f"cannot listen on {address} (gRPC)")
        self._server, self._loop = server, asyncio.get_running_loop()

    async def start(self) -> None:
        """Answer calls. Raises OSError."""
        if self._server is None:
            await self.bind()
        await self._health.look()
        self._looking = asyncio.ensure_future(self._health.keep_looking())
        await self._server.start()
        log.info("Starting gRPC server: %s", _address(self._config.hostname, self.port))

    def drain(self) -> None:
        """Begin to refuse new calls, and give open ones at most `drain_seconds`. Returns at
        once."""
        if self._draining is None and self._server is not None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._health.enter_graceful_shutdown()
        self._gate.drain()
        await self._server.stop(self._config.drain_seconds)

    def hurry(self) -> None:
        """End the open calls. A signal handler may call this."""
        if self._loop is not None:
            # The waiting drain ends too
            asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop)

    async def stop(self) -> None:
        """Drain, and wait for its end."""
        self.drain()
        if self._draining is not None:
            await self._draining


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Give each connection the latest certificate. gRPC calls the function in its own thread."""
    used = certificate.pair

    # None: gRPC keeps the certificate that it has
    def changed_certificate() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if certificate.pair is used:
            return None
        used = certificate.pair
        return grpc.ssl_server_certificate_configuration([used])

    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([used]), changed_certificate
    )


def _address(hostname: str, port: int) -> str:
    return f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"


# Between checks of the models
HEALTH_SECONDS = 5.0
STATUSES = health_pb2.HealthCheckResponse


# Service -> a function that tells if a model serves it; None: no model is needed.
FITS = {
    "": None,
    f"{PACKAGE}.Info": None,
    f"{PACKAGE}.Tokenize": None,
    f"{PACKAGE}.Embed": lambda context: context.service.model.spec.role == "embedding",
    f"{PACKAGE}.Predict": lambda context: Head.SCORES in context.heads,
    f"{PACKAGE}.Rerank": lambda context: (
        context.service.model.spec.role != "classifier" and "rerank" in capabilities(context.heads)
    ),
}


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """grpcio's servicer. A service is SERVING while a model for it is healthy."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self._models = models

    async def look(self) -> None:
        """Update the statuses of all services, and of the server, whose name is ""."""
        for name, fits in FITS.items():
            is_served = not self._models.leaving and (fits is None or await self._serves(fits))
            await self.set(name, STATUSES.SERVING if is_served else STATUSES.NOT_SERVING)

    async def keep_looking(self) -> None:
        """Update the statuses periodically until cancelled."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self.look()

    async def _serves(self, fits: Callable[[Context], bool]) -> bool:
        for context in filter(fits, self._models.ready):
            with suppress(Unhealthy):
                await context.service.check_health()
                return True
        return False

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        statuses = {
            name: await self.Check(health_pb2.HealthCheckRequest(service=name), context)
            for name in FITS
        }
        return health_pb2.HealthListResponse(statuses=statuses)


# One service under two names
REFLECTIONS = [f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]


def reflection_handlers() -> list[grpc.GenericRpcHandler]:
    """Handlers of `v1`, which clients try first, and of `v1alpha`."""
    names = [
        *(service.full_name for service in services()),
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    ]
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer([*names, *REFLECTIONS], pool=POOL).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
        for name in REFLECTIONS
    ]


# Described by reflection, besides `tei.proto`
for _file in (
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
):
    POOL.AddSerializedFile(_file.serialized_pb)
_alpha = text_format.MessageToString(
    descriptor_pb2.FileDescriptorProto.FromString(_file.serialized_pb)
)
POOL.Add(text_format.Parse(_alpha.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto()))
