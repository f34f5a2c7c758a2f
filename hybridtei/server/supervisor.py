"""Several processes for HTTP over one engine, which is in this process: started, watched, replaced and drained from here.

They share one listening socket, bound here and inherited, rather than one each under SO_REUSEPORT: what waits to be accepted
is not lost with a worker that dies, nor stuck behind one that is busy; and a second server on the port is refused.

Workers are started afresh, not forked: this process has threads, and sessions that would not survive it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

import msgspec
import uvloop

from hybridtei.backends.base import Backend
from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.engine.admission import Admission, shared_memory
from hybridtei.engine.device import STOP_SECONDS
from hybridtei.engine.remote import Channel, EngineServer, RemoteBackend
from hybridtei.engine.service import EngineService
from hybridtei.errors import LoadError
from hybridtei.observability.metrics import Reading, Registry
from hybridtei.server.http.connection import bound
from hybridtei.server.run import BACKLOG, MetricsPort, announce, end_at_once
from hybridtei.server.worker import Count, Counted, Drain, Exposition, Ready, Scrape, Serve, Setup
from hybridtei.system import machine, memory

WATCH_SECONDS = 0.2  # between looks at the engine
RETRY_SECONDS = 1.0  # before a worker that never came to serve is replaced
COUNT_SECONDS = 0.5  # that a scrape waits for the other workers
# Not `-m`: messages name their classes by module, which must not be `__main__`.
WORKER = "import sys; from hybridtei.server.worker import main; sys.exit(main(sys.argv[1:]))"
GRACE_SECONDS = 5.0  # after its drain, until a worker is killed

log = logging.getLogger(__name__)


def run_workers(
    service: EngineService,
    server: ServerConfig,
    model: ModelConfig,
    *,
    registry: Registry,
    metrics_port: MetricsPort | None = None,
) -> None:
    """Serve until told to stop. Raises OSError if the port is taken, LoadError if workers do not start, BackendError if the
    engine dies. `registry`: the one the service counts in. `metrics_port`: served from here."""
    with bound(server.hostname, server.port) as listening:
        uvloop.run(Supervisor(service, server, model, registry, listening, metrics_port=metrics_port).run())
    if service.engine.busy:
        end_at_once()


class _Worker:
    """One worker process and its connections."""

    def __init__(self, process: subprocess.Popen[bytes], supervisor: Supervisor) -> None:
        self.process = process
        self.readings: Sequence[Reading] = ()
        self.serving = False
        self.ready, self.counted, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.control = Channel(self._received, self.gone.set)
        self.engine_server = EngineServer(supervisor.service.engine)
        self._supervisor = supervisor

    async def open(self, engine: socket.socket, control: socket.socket, setup: Setup) -> None:
        await self.engine_server.open(engine)
        await self.control.open(control)
        self.control.send(setup)

    async def ready_or_gone(self) -> bool:
        """Wait for either; return whether it is ready."""
        await _first(self.ready.wait(), self.gone.wait())
        return self.ready.is_set()

    def serve(self) -> None:
        self.serving = True
        self.control.send(Serve())

    def drain(self) -> None:
        if self.ready.is_set():
            self.control.send(Drain())
        else:
            self.process.kill()
            self.gone.set()  # its connection may not be open yet

    async def ended(self, limit: float | None = None) -> int:
        """Return its exit status once it is gone; kill it after `limit` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), limit)
        end = monotonic() + GRACE_SECONDS
        while (status := self.process.poll()) is None:
            if not self.gone.is_set() or monotonic() > end:
                self.process.kill()
            await asyncio.sleep(0.01)
        self.engine_server.close()
        self.control.close()
        return status

    def _received(self, message: Ready | Counted | Scrape) -> None:
        if isinstance(message, Ready):
            self.ready.set()
            return
        self.readings = message.readings
        if isinstance(message, Scrape):
            self._supervisor.scraped(self, message.number)
        else:
            self.counted.set()


class Supervisor:
    """Starts, watches, replaces and drains the workers of one engine."""

    def __init__(
        self,
        service: EngineService,
        server: ServerConfig,
        model: ModelConfig,
        registry: Registry,
        listening: socket.socket,
        *,
        metrics_port: MetricsPort | None,
    ) -> None:
        self.service = service
        self._server = server
        self._registry = registry
        self._ended = Registry()  # metrics of dead workers: a sum must not fall
        self._listening = listening
        self._metrics_port = metrics_port
        self._setup = Setup(
            _described(service.backend, service.reader.max_input_length),
            service.budget_tokens,
            msgspec.structs.replace(model, hf_token=None),
            service.config,
            server,
        )
        self._places = range(server.http_workers or 1)
        self._permits = shared_memory(len(self._places))
        self._admission = Admission(service.config.max_concurrent_requests, self._permits, 0)
        self._workers: dict[int, _Worker] = {}
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a signal or the engine's end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._server.api_key_file is not None or self._server.certfile is not None:
            loop.add_signal_handler(signal.SIGHUP, self._forward_signal, signal.SIGHUP)
        await self.service.start()
        keepers: list[asyncio.Task[None]] = []
        try:
            for place in self._places:
                await self._start_worker(place)
            if await self._all_ready():
                self._open()
                if self._metrics_port is not None:
                    await self._metrics_port.start(self._exposition)
                keepers = [asyncio.create_task(self._keep(place)) for place in self._workers]
                await self._watch(keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await self._stop_workers()
            if self._metrics_port is not None:
                await self._metrics_port.stop()
            for task in self._tasks:
                task.cancel()
            await self.service.stop(STOP_SECONDS)
        if self.service.dead is not None:
            raise self.service.dead

    def scraped(self, worker: _Worker, number: int) -> None:
        """Answer a worker that asks for the metrics of all."""
        task = asyncio.create_task(self._expose(worker, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set() and number == signal.SIGINT:  # a second interrupt does not wait for requests
            for worker in self._workers.values():
                worker.process.kill()
        self._stopping.set()

    def _forward_signal(self, number: int) -> None:
        """Pass a signal on to the workers, which read their files again."""
        for worker in self._workers.values():
            worker.process.send_signal(number)

    async def _start_worker(self, place: int) -> _Worker:
        """Start a worker process at a place."""
        (engine, engine_there), (control, control_there) = socket.socketpair(), socket.socketpair()
        with engine_there, control_there:
            inherited = (self._listening.fileno(), engine_there.fileno(), control_there.fileno(), self._permits)
            process = subprocess.Popen(
                machine.python_command("-c", WORKER, *map(str, inherited), str(place)),
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=memory.with_limited_heaps(machine.child_environment()),  # in this folder: it opens the same paths
            )
        worker = self._workers[place] = _Worker(process, self)
        await worker.open(engine, control, self._setup)
        return worker

    async def _all_ready(self) -> bool:
        """Wait until all are ready; return False if stopped before. Raises LoadError if one ends."""
        for worker in self._workers.values():
            await _first(worker.ready_or_gone(), self._stopping.wait())
            if self._stopping.is_set():
                return False
            if not worker.ready.is_set():
                raise LoadError(f"an HTTP worker ended with status {await worker.ended()} before it could serve")
        return True

    def _open(self) -> None:
        self._listening.listen(BACKLOG)
        memory.settle()
        for worker in self._workers.values():
            worker.serve()
        log.info("%d HTTP workers: processes %s", len(self._workers), [one.process.pid for one in self._workers.values()])
        announce(*self._listening.getsockname()[:2])

    async def _watch(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        while not self._stopping.is_set() and self.service.dead is None:
            await asyncio.sleep(WATCH_SECONDS)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()

    async def _keep(self, place: int) -> None:
        """Replace each worker that dies at a place."""
        while True:
            worker = self._workers[place]
            status = await worker.ended()
            if self._stopping.is_set():
                return
            log.error("HTTP worker %d ended with status %d; another is started", worker.process.pid, status)
            self._admission.clear(place)
            self._ended.absorb(worker.readings)
            worker.readings = ()
            if not worker.serving:
                await asyncio.sleep(RETRY_SECONDS)
            replacement = await self._start_worker(place)
            if await replacement.ready_or_gone():
                replacement.serve()

    async def _expose(self, asking: _Worker, number: int) -> None:
        asking.control.send(Exposition(number, await self._exposition(asking)))

    async def _exposition(self, asking: _Worker | None = None) -> str:
        """Return the metrics of all workers as text; the asking worker has sent its own."""
        others = [worker for worker in self._workers.values() if worker is not asking and worker.serving]
        for worker in others:
            worker.counted.clear()
            worker.control.send(Count())
        with suppress(TimeoutError):  # of a worker too busy to answer, the last metrics count
            await asyncio.wait_for(asyncio.gather(*(worker.counted.wait() for worker in others)), COUNT_SECONDS)
        total = Registry()
        for readings in (self._registry.readings(), self._ended.readings(), *(w.readings for w in self._workers.values())):
            total.absorb(readings)
        return total.text()

    async def _stop_workers(self) -> None:
        self._listening.close()
        for worker in self._workers.values():
            worker.drain()
        await asyncio.gather(*(worker.ended(self._server.drain_seconds + GRACE_SECONDS) for worker in self._workers.values()))


def _described(backend: Backend, max_input_length: int) -> RemoteBackend:
    """Describe the backend to workers, with the reader's limit, so that no worker warns of it again."""
    spec = dataclasses.replace(backend.spec, max_input_length=max_input_length)
    return RemoteBackend(spec, backend.name, backend.dtype, backend.padding, backend.busy_tokens, tuple(backend.lanes))


async def _first(*waits: object) -> None:
    """Wait until one of them ends."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
