"""The engine's process: it loads models and runs their passes for the HTTP process, which started it and whose end is its own.

    python -m hybridtei.server.engine_child DESCRIPTOR

DESCRIPTOR: of its end of the connection, which it inherits. `engine_process` says what goes over it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from hybridtei.batch import Head
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import BackendError, HybridTeiError
from hybridtei.inference.engine.engine import Engine
from hybridtei.inference.engine.scheduler import apart
from hybridtei.inference.engine.service import engine_of
from hybridtei.inference.load import load_model
from hybridtei.outputs import HeadOutputs
from hybridtei.server.engine_process import COUNTED, RemoteBackend, receive, send
from hybridtei.server.start import Fleet, on_thread
from hybridtei.system import logs, memory
from hybridtei.system.metrics import Reading, Registry

LOOK_SECONDS = 0.5  # between looks at the lanes; as often the metrics are sent

log = logging.getLogger(__name__)


class EngineChild:
    """Answers the calls that come over the connection, many at a time."""

    def __init__(self, connection: Connection, config: EngineConfig) -> None:
        self._connection = connection
        self._config = config
        self._fleet = Fleet(config)
        self._engines: dict[int, tuple[Engine, Registry]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Any] = []

    async def serve(self, calls: list[Any]) -> None:
        """Answer these calls and all that come; end the process with the lanes, or once the connection is closed."""
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)
        self._begin(calls)
        while self._fleet.dead is None:
            await asyncio.sleep(LOOK_SECONDS)
            self._answer(COUNTED, {number: registry.readings() for number, (_, registry) in self._engines.items()})
        log.critical("%s", self._fleet.dead)
        _end(1)

    async def load(self, number: int, config: ModelConfig) -> RemoteBackend:
        """Load a model, and describe it."""
        loaded = await on_thread(load_model, config, self._config)
        one, registry = loaded.backend, Registry()
        engine = engine_of(one, self._config, loaded.budget_tokens, registry, self._fleet.device(one.lanes))
        await engine.start()
        self._engines[number] = engine, registry
        spec = replace(one.spec, max_input_length=loaded.model.reader.max_input_length)  # so that no reader warns again
        found = RemoteBackend(
            spec, one.name, one.dtype, one.padding, tuple(one.lanes), getattr(one, "ahead", 0), loaded.budget_tokens
        )
        del loaded
        memory.settle()  # the tokenizer's work is done in the other process
        return found

    async def unload(self, number: int, seconds: float | None) -> list[Reading]:
        """See `Engine.stop`; return its metrics."""
        engine, registry = self._engines.pop(number)
        await engine.stop(seconds)
        del engine
        await asyncio.to_thread(memory.trim)
        return registry.readings()

    async def run(self, number: int, encodings: Any, heads: frozenset[Head], now_ns: int) -> tuple[HeadOutputs, int, int]:
        """Return the outputs of a request, and its times summed over its sequences."""
        request = await self._engines[number][0].run(apart(*encodings), heads, now_ns)
        return request.outputs(), request.queue_ns, request.inference_ns

    async def probe(self, number: int) -> None:
        """See `Engine.check_health`."""
        await self._engines[number][0].check_health()

    def _read(self) -> None:
        try:
            self._begin(receive(self._connection))
        except (EOFError, OSError):
            _end(0)

    def _begin(self, calls: list[Any]) -> None:
        for number, method, arguments in calls:
            if method == "stop":
                _end(0)
            if method != "cancel":
                task = self._running[number] = asyncio.create_task(self._run(number, getattr(self, method)(*arguments)))
                task.add_done_callback(lambda _, number=number: self._running.pop(number, None))  # type: ignore[misc]
            elif number in self._running:
                self._running[number].cancel()

    async def _run(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._answer(number, await work)
        except Exception as error:  # any is answered, since the caller waits
            known = isinstance(error, HybridTeiError)
            self._answer(number, None, error if known else BackendError(f"{type(error).__name__}: {error}"))

    def _answer(self, number: int, value: Any, error: Exception | None = None) -> None:
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)  # what one pass completes goes together
        self._answers.append((number, value, error))

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        try:
            send(self._connection, answers)
        except OSError:
            _end(0)


def _end(status: int) -> NoReturn:
    """At once: a destructor of a runtime under a pass would abort."""
    logging.shutdown()
    os._exit(status)


def main(descriptor: int) -> None:
    """Serve one connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal and systemd send them to all processes
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    memory.limit_heaps()
    connection = Connection(descriptor)
    (config, settings), *calls = receive(connection)
    logs.configure(**settings)
    asyncio.run(EngineChild(connection, config).serve(calls))  # not uvloop: it would make the connection non-blocking


if __name__ == "__main__":
    main(int(sys.argv[1]))
