"""The gRPC server beside the HTTP server: listen, answer, drain. Reflection and health ask for no key.

It must be made on the running loop, which is uvloop's under uvicorn; `grpc.aio` takes whichever runs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from hybridtei.config import ServerConfig
from hybridtei.rpc import health, messages
from hybridtei.rpc.services import Front, handlers
from hybridtei.server.auth import Door
from hybridtei.server.models import Models
from hybridtei.server.tls import Certificate
from hybridtei.server.tracing import Recorder

CALLS = 2048  # that may be open at once; further ones are RESOURCE_EXHAUSTED

log = logging.getLogger(__name__)


class RpcServer:
    """All models of a process, on `grpc_port`."""

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        recorder: Recorder | None,
        door: Door,
        certificate: Certificate | None = None,
    ) -> None:
        self.port = 0  # known once it listens
        self._models = models
        self._config = config
        self._recorder = recorder
        self._door = door
        self._certificate = certificate
        self._server: Any = None
        self._ending: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def bind(self) -> None:
        """Take the port. Raises OSError."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._config.payload_limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # or two servers would share a port unawares
            ],
            maximum_concurrent_rpcs=CALLS,
        )
        address = _address(self._config.hostname, self._config.grpc_port or 0)
        try:
            self.port = _listen(server, address, self._certificate)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise OSError(f"cannot listen on {address} (gRPC)")
        self._ending = asyncio.Event()
        checks = health.Health(self._models, self._ending)
        server.add_generic_rpc_handlers((*handlers(Front(self._models, self._door, self._recorder)), checks.handler()))
        _reflect(server)
        self._server, self._loop = server, asyncio.get_running_loop()

    async def start(self) -> None:
        """Answer from now on. Raises OSError."""
        if self._server is None:
            await self.bind()
        await self._server.start()
        log.info("Starting gRPC server: %s", _address(self._config.hostname, self.port))

    def drain(self) -> None:
        """Refuse new calls, and let open ones end, at most for `drain_seconds`; returns at once."""
        if self._draining is None and self._server is not None and self._ending is not None:
            self._ending.set()
            self._draining = asyncio.ensure_future(self._server.stop(self._config.drain_seconds))

    def hurry(self) -> None:
        """Cut off what is still open. To be called from a signal handler."""
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
    """The port; 0 or RuntimeError where there is none."""
    if certificate is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _credentials(certificate)))


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Each connection gets the certificate that was read last; gRPC asks from a thread of its own."""
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


def _reflect(server: Any) -> None:
    names = [service.full_name for service in messages.services()]
    reflection.enable_server_reflection([*names, health.NAME, reflection.SERVICE_NAME], server, pool=messages.POOL)


for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):  # what reflection tells, besides our own
    messages.POOL.AddSerializedFile(_file.serialized_pb)
