"""One of several processes that speak HTTP for one engine: JSON, tokeniser, and of the model nothing but its description.

Its orders come from the process that has the engine, and it does not outlive that one. `supervisor` starts it. The messages
of both, besides requests, are defined here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import FrameType
from typing import Any

import uvicorn

from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.engine.admission import Admission
from hybridtei.engine.remote import Channel, RemoteBackend, RemoteEngine
from hybridtei.engine.service import EngineService
from hybridtei.load import text_model
from hybridtei.observability import logs
from hybridtei.observability.metrics import Reading, Registry
from hybridtei.server.app import create_app
from hybridtei.server.http.connection import allow_files
from hybridtei.server.run import DrainingServer, reloader, settings_of
from hybridtei.system.frames import receive_now, send_now

REPORT_SECONDS = 1.0
SCRAPE_SECONDS = 2.0  # after which a worker answers with its own metrics
HASTE_SECONDS = 1.0  # for answers that say the engine is gone

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """To a worker, first: its whole configuration. The specification is sent too, since reading it needs the model's files, and
    some of those need torch."""

    backend: RemoteBackend
    budget_tokens: int
    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: it is ready to serve."""


@dataclass(frozen=True, slots=True)
class Serve:
    """To a worker: accept connections."""


@dataclass(frozen=True, slots=True)
class Drain:
    """To a worker: finish open requests, and end."""


@dataclass(frozen=True, slots=True)
class Count:
    """To a worker: asks for its metrics."""


@dataclass(frozen=True, slots=True)
class Counted:
    """From a worker, when asked and every second, so that little is lost if it dies."""

    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class Scrape:
    """From a worker: a client asks for the metrics of all."""

    number: int
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class Exposition:
    """To a worker: the metrics of all, as text."""

    number: int
    text: str


class SharedRegistry(Registry):
    """A worker's own metrics; its text is the last that was fetched of all."""

    fetched: str | None = None

    def text(self) -> str:
        return super().text() if self.fetched is None else self.fetched


class ControlClient:
    """A worker's connection to the process with the engine."""

    def __init__(self, end: socket.socket, registry: SharedRegistry) -> None:
        self.server: WorkerServer | None = None
        self._end = end
        self._registry = registry
        self._channel = Channel(self._received, self._lost)
        self._numbers = count()
        self._scrapes: dict[int, asyncio.Future[str]] = {}
        self._closed = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._channel.open(self._end)
        self._reporting = asyncio.create_task(self._report())

    async def close(self) -> None:
        """Send the last metrics, and wait until the connection is closed."""
        if self._reporting is not None:
            self._reporting.cancel()
        self.server = None
        self._channel.send(Counted(self._registry.readings()))
        self._channel.close()
        await self._closed.wait()

    async def fetch(self) -> None:
        """Bring the metrics' text up to date."""
        number = next(self._numbers)
        arrived = self._scrapes[number] = asyncio.get_running_loop().create_future()
        self._channel.send(Scrape(number, self._registry.readings()))
        try:
            self._registry.fetched = await asyncio.wait_for(arrived, SCRAPE_SECONDS)
        except TimeoutError:
            log.warning("the metrics of all workers did not come in time")
        finally:
            del self._scrapes[number]

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._channel.send(Counted(self._registry.readings()))

    def _received(self, order: Count | Drain | Exposition) -> None:
        if isinstance(order, Count):
            self._channel.send(Counted(self._registry.readings()))
        elif isinstance(order, Exposition):
            arrived = self._scrapes.get(order.number)
            if arrived is not None and not arrived.done():
                arrived.set_result(order.text)
        elif self.server is not None:
            self.server.should_exit = True

    def _lost(self) -> None:
        self._closed.set()
        if self.server is not None:
            log.critical("the engine's process is gone; this worker ends")
            self.server.abandon()


class WorkerServer(DrainingServer):
    """A server that drains when the supervisor or a signal says so."""

    def __init__(
        self,
        settings: uvicorn.Config,
        drain_seconds: float,
        control: ControlClient,
        *,
        reload: Callable[[], object] | None,
        dead: Callable[[], object],
    ) -> None:
        super().__init__(settings, drain_seconds, reload=reload, dead=dead)
        self.abandoned = False
        self._control = control
        control.server = self

    def announce(self) -> None:
        """Log nothing: the supervisor announces the address."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Exit once. uvicorn would take a second signal for a forced exit, but Ctrl-C reaches every process besides the
        order."""
        self.should_exit = True

    def abandon(self) -> None:
        """Exit within `HASTE_SECONDS`, since the engine is gone."""
        self.abandoned = self.should_exit = True
        self._drain_seconds = min(self._drain_seconds, HASTE_SECONDS)

    async def startup(self, sockets: Any = None) -> None:
        await self._control.open()
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await self._control.close()


def main(arguments: Sequence[str]) -> int:
    """`arguments`: descriptors of the listening socket, of those to engine and supervisor, and of the permits; its place."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it serves there is nothing to finish
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nor to read again
    listening, engine, control, permits, place = map(int, arguments)
    control_end = socket.socket(fileno=control)
    try:
        setup: Setup = receive_now(control_end)
        spoken = setup.server
        is_json = spoken.json_output or spoken.log_format == "json"
        logs.configure(json_output=is_json, level=spoken.log_level, spans=not spoken.disable_spans)
        registry = SharedRegistry()
        app = _application(setup, registry, socket.socket(fileno=engine), permits, place)
        send_now(control_end, Ready())
        if not isinstance(receive_now(control_end), Serve):
            return 0
    except (EOFError, ConnectionError):  # the other process is gone
        return 1
    return _serve(app, setup, ControlClient(control_end, registry), socket.socket(fileno=listening))


def _application(setup: Setup, registry: Registry, engine: socket.socket, permits: int, place: int) -> Any:
    spec = setup.backend.spec
    service = EngineService(
        text_model(spec, setup.engine),
        setup.backend,
        setup.engine,
        budget_tokens=setup.budget_tokens,
        engine=RemoteEngine(engine),
        admission=Admission(setup.engine.max_concurrent_requests, permits, place),
    )
    return create_app(service, setup.server, setup.model, registry=registry)


def _serve(app: Any, setup: Setup, control: ControlClient, listening: socket.socket) -> int:
    async def up_to_date(scope: Any, receive: Any, send: Any) -> None:
        """Fetch the metrics of all workers before the route that returns them, which cannot wait."""
        if scope["type"] == "http" and scope["path"] == "/metrics":
            await control.fetch()
        await app(scope, receive, send)

    allow_files(setup.server.max_connections)
    state = app.state
    models = state.models
    settings = settings_of(up_to_date, setup.server, state.refusals, state.unsent, state.certificate, overload=state.overload)
    server = WorkerServer(
        settings, setup.server.drain_seconds, control, reload=reloader(app, setup.server), dead=lambda: models.dead
    )
    with suppress(SystemExit):  # how uvicorn gives up at start, once it has logged why
        server.run(sockets=[listening])
    if server.abandoned:
        logging.shutdown()
        os._exit(1)  # whatever a thread may still do, nobody waits for it
    return 0 if server.started and models.dead is None else 1
