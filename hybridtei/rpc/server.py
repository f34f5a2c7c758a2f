"""The gRPC server beside the HTTP server: listen, answer, drain.

`grpc.aio` takes the loop that runs when `bind` is called, which is uvloop's under uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Any

import grpc

from hybridtei.config import ServerConfig
from hybridtei.observability.tracing import Recorder
from hybridtei.rpc.calls import Bounds, CallTable, OpenCalls
from hybridtei.rpc.health import Health, reflection_endpoints
from hybridtei.rpc.services import RpcContext, tei_endpoints
from hybridtei.server.http.connection import Unsent
from hybridtei.server.http.security import Authenticator, Certificate
from hybridtei.server.registry import Models

MAX_CALLS = 2048  # of `tei.v1` that are open at once
IDLE_SECONDS = 600.0  # between two messages of a stream
HOUR_MS = 3_600_000
# Services that need no key. The longest call of health is `Watch`, which clients begin anew.
HEALTH, REFLECTION = Bounds(256, age_seconds=3600.0), Bounds(64, age_seconds=600.0)
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

log = logging.getLogger(__name__)


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
        self._calls = OpenCalls(calls), OpenCalls(HEALTH), OpenCalls(REFLECTION)
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
