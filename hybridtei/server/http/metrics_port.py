"""/metrics alone on a port of its own, for scrapers that are not to reach the API: at any path, as TEI's gRPC build has it.

The port is taken before a model is loaded, so that one that is taken already is told at once; it refuses connections until
there is something to tell.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from litestar import Litestar

from hybridtei.config import ServerConfig
from hybridtei.server.http.limits import bound
from hybridtei.server.http.protocol import BoundedHttpProtocol

CONTENT = [(b"content-type", b"text/plain; charset=utf-8")]
STOP_SECONDS = 1

Tell = Callable[[], Awaitable[str]]
log = logging.getLogger(__name__)


@contextmanager
def reserved(server: ServerConfig) -> Iterator[MetricsPort | None]:
    """The port, taken; None without `prometheus_port`. Raises OSError."""
    if server.prometheus_port is None:
        yield None
        return
    with bound(server.hostname, server.prometheus_port) as listening:
        yield MetricsPort(listening)


class _Beside(uvicorn.Server):
    """Signals are the main server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetricsPort:
    """A server of one answer, on the event loop of whoever starts it."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._server: _Beside | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, tell: Tell) -> None:
        """Serve what `tell` says from now on."""
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
        """Answer no more."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def attached(app: Litestar, port: MetricsPort | None) -> Litestar:
    """The application, whose metrics the port tells for as long as it lives."""
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
