"""The application on a socket: uvicorn, until SIGTERM or SIGINT; then open requests are finished, and the status is 0."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from typing import Any

import uvicorn

from hybridtei.config import ServerConfig

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """uvicorn, but a termination signal is an orderly end: upstream raises it again afterwards, and exits with -15."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2] if self.servers else ("?", 0)
            log.info("Starting HTTP server: %s:%d", host, port)
            log.info("Ready")


def run_server(app: Any, config: ServerConfig) -> None:
    """Serve until told to stop."""
    settings = uvicorn.Config(
        app,
        host=config.hostname,
        port=config.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=True,
        backlog=2048,
        timeout_keep_alive=75,  # clients keep pools; the default of 5 s would cut them off between two requests
        timeout_graceful_shutdown=ceil(config.drain_seconds),
    )
    server = DrainingServer(settings)
    with suppress(SystemExit):  # how uvicorn gives up at start, once it has logged why
        server.run()
    if not server.started:
        raise OSError(f"cannot listen on {config.hostname}:{config.port}")
