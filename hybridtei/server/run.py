"""The application on a socket: uvicorn, until SIGTERM or SIGINT; then open requests are finished, and the status is 0.

A request that is not finished when the drain is over (a client may stall in the middle of a body) is cut off. Beside it,
/metrics alone on a port of its own, for scrapers that are not to reach the API: at any path, as TEI's gRPC build has it. That
port is taken before a model is loaded, and refuses connections until there is something to tell.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from litestar import Litestar

from hybridtei.config import ServerConfig
from hybridtei.server.http.connection import ConnectionLimits, Refusals, Unsent, allow_files, bound
from hybridtei.server.http.protocol import BoundedHttpProtocol
from hybridtei.server.http.security import Begun, Certificate, Handshake, certificate_of
from hybridtei.system import memory

if TYPE_CHECKING:
    from hybridtei.rpc.server import RpcServer


BACKLOG = 2048  # connections that may wait to be accepted
KEEP_ALIVE_SECONDS = 75  # clients keep pools; the default of 5 would cut them off between two requests
log = logging.getLogger(__name__)


def _nothing() -> None:
    """No model, so none is dead."""


class DrainingServer(uvicorn.Server):
    """uvicorn, but a termination signal is an orderly end: upstream raises it again afterwards, and exits with -15."""

    def __init__(
        self,
        settings: uvicorn.Config,
        drain_seconds: float,
        rpc: RpcServer | None = None,
        reload: Callable[[], object] | None = None,
        dead: Callable[[], object] = _nothing,
    ) -> None:
        """`rpc`: the application's own, which drains while this one does. `reload`: what SIGHUP asks for; None: it ends the
        process, as it ends any. `dead`: looked at now and then; why the server should end by itself, or None."""
        super().__init__(settings)
        self._dead = dead
        self._drain_seconds = drain_seconds
        self._rpc = rpc
        self._reload = reload

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        if self._reload is not None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._read_again)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Upstream forces the exit at a second Ctrl-C."""
        super().handle_exit(sig, frame)
        if self.force_exit and self._rpc is not None:
            self._rpc.hurry()

    def _read_again(self, sig: int, frame: FrameType | None) -> None:
        if self._reload is not None:
            self._reload()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. A dead engine ends the server, which could only answer 503 until a restart."""
        self.should_exit = self.should_exit or self._dead() is not None
        return await super().on_tick(counter)

    async def startup(self, sockets: Any = None) -> None:
        if self._rpc is not None:
            await self._rpc.bind()  # a port that is taken is an error before anything starts
        await super().startup(sockets)
        memory.settle()  # modules and model live as long as the process
        if self.started and not self.should_exit:  # a signal may have come meanwhile
            self.announce()

    def announce(self) -> None:
        """Log that clients are answered from now on."""
        host, port = self.servers[0].sockets[0].getsockname()[:2] if self.servers else ("?", 0)
        log.info("Starting HTTP server: %s:%d", host, port, extra={"facts": {"host": host, "port": port}})
        log.info("Ready")

    async def shutdown(self, sockets: Any = None) -> None:
        if self._rpc is not None:
            self._rpc.drain()
        end = asyncio.get_running_loop().call_later(self._drain_seconds, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    def _cut_off(self) -> None:
        connections = [*self.server_state.connections]
        if connections:
            log.warning("the drain is over: %d connections are cut off", len(connections))
        for connection in connections:
            connection.transport.abort()


def settings_of(
    app: Any,
    config: ServerConfig,
    refusals: Refusals | None = None,
    unsent: Unsent | None = None,
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """uvicorn's settings for an application. Raises LoadError for an invalid certificate. `refusals`: counts refused
    connections; `unsent`: where the application's answers are counted; `certificate`: the one of the settings,
    if it was read already."""
    limits = ConnectionLimits.of(config, refusals, unsent)
    settings = uvicorn.Config(
        app,
        host=config.hostname,
        port=config.port,
        loop="uvloop",
        http=partial(BoundedHttpProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=True,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        reset_contextvars=True,  # a pipelined request is begun by the one before it, whose key and span are not its own
        timeout_graceful_shutdown=ceil(config.drain_seconds) + 1,  # for what survives being cut off
    )
    certificate = certificate or certificate_of(config)
    if certificate is not None:
        settings.http = _encrypted(settings.http, certificate.accepting(), limits)
    return settings


def _encrypted(http: Any, context: ssl.SSLContext, limits: ConnectionLimits) -> Any:
    """A protocol factory for connections whose TLS is ours, not uvicorn's."""
    begun: Begun = {}
    return lambda **settings: Handshake(begun, context, limits, partial(http, **settings))


def reloader(app: Any, config: ServerConfig) -> Callable[[], None] | None:
    """A function that reads the files of keys and certificate again; None without such files."""
    certificate = app.state.certificate
    if config.api_key_file is None and certificate is None:
        return None

    def reload() -> None:
        if config.api_key_file is not None:
            app.state.authenticator.keys.reload()
        if certificate is not None:
            certificate.reload()

    return reload


def run_server(app: Any, config: ServerConfig) -> None:
    """Serve until a signal. Raises OSError if the port is taken, BackendError if the engine dies."""
    allow_files(config.max_connections)
    state = app.state
    models = state.models
    settings = settings_of(app, config, state.refusals, state.unsent, state.certificate)
    server = DrainingServer(settings, config.drain_seconds, state.rpc, reload=reloader(app, config), dead=lambda: models.dead)
    shared = [bound(config.hostname, config.port, shared=True)] if config.reuse_port else None
    with suppress(SystemExit):  # uvicorn's exit where it cannot start, after its log entry
        server.run(shared)
    if not server.started:
        raise OSError(f"cannot listen on {config.hostname}:{config.port}")
    if models.dead is not None:
        raise models.dead
    if models.busy:
        end_at_once()


def end_at_once() -> None:
    """With status 0, beside a pass that has not ended and has no caller: an ordinary end would run the destructors of
    the library under it, and abort. Does nothing in a thread of a program that goes on."""
    if threading.current_thread() is threading.main_thread():
        logging.shutdown()
        os._exit(0)


CONTENT = [(b"content-type", b"text/plain; charset=utf-8")]
STOP_SECONDS = 1

Tell = Callable[[], Awaitable[str]]


@contextmanager
def reserved(server: ServerConfig) -> Iterator[MetricsPort | None]:
    """The port, taken; None without `prometheus_port`. Raises OSError."""
    if server.prometheus_port is None:
        yield None
        return
    with bound(server.hostname, server.prometheus_port) as listening:
        yield MetricsPort(listening)


class _Beside(uvicorn.Server):
    """A server beside the main one, which handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetricsPort:
    """A server of one answer, on the running event loop."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._server: _Beside | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, tell: Tell) -> None:
        """Serve the text that `tell` returns."""
        settings = uvicorn.Config(
            _answering(tell),
            loop="none",
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        self._server = _Beside(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        host, port = self._listening.getsockname()[:2]
        log.info("Serving metrics: %s:%d", host, port)

    async def stop(self) -> None:
        """Stop the server."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def attached(app: Litestar, port: MetricsPort | None) -> Litestar:
    """The application, with its metrics on the port from its start to its end."""
    if port is not None:

        async def tell() -> str:
            return str(app.state.models.metrics())

        app.on_startup.append(partial(port.start, tell))
        app.on_shutdown.append(port.stop)
    return app


def _answering(tell: Tell) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        allowed = scope["method"] in ("GET", "HEAD")
        body = (await tell()).encode() if allowed else b""
        headers = [*(CONTENT if allowed else [(b"allow", b"GET,HEAD")]), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200 if allowed else 405, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app
