"""The engine's process: it loads models and runs passes for the HTTP process that started it, and
ends when that one ends.

    python -m hybridtei.server.engine_child DESCRIPTOR

DESCRIPTOR: the inherited file descriptor of its end of the connection. `engine_process` describes
the messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from hybridtei.batch import Head
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import BackendError, HybridTeiError
from hybridtei.inference.engine.service import Engine, engine_of
from hybridtei.inference.load import load_model
from hybridtei.outputs import HeadOutputs
from hybridtei.server.engine_process import COUNTED, RemoteBackend, apart, receive, send
from hybridtei.server.start import ModelLoader, on_thread
from hybridtei.system import logs, memory
from hybridtei.system.metrics import Reading, Registry

# Between checks of the lanes; metrics are sent at each check
COUNT_SECONDS = 0.5

log = logging.getLogger(__name__)


class EngineChild:
    """Answers calls from the connection concurrently."""

    def __init__(self, connection: Connection, config: EngineConfig) -> None:
        self._connection = connection
        self._config = config
        self._loader = ModelLoader(config)
        self._engines: dict[int, tuple[Engine, Registry]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Any] = []

    async def serve(self, calls: list[Any]) -> None:
        """Answer `calls` and all later ones. End the process when the lanes die or the connection
        closes."""
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)
        self._begin(calls)
        while self._loader.dead is None:
            await asyncio.sleep(COUNT_SECONDS)
            self._answer(
                COUNTED,
                {number: registry.readings() for number, (_, registry) in self._engines.items()},
            )
        log.critical("%s", self._loader.dead)
        _end(1)

    async def load(self, number: int, config: ModelConfig) -> RemoteBackend:
        """Load a model, and describe it."""
        loaded = await on_thread(load_model, config, self._config)
        backend, registry = loaded.backend, Registry()
        engine = engine_of(
            backend,
            self._config,
            loaded.budget_tokens,
            registry,
            self._loader.device(backend.lanes),
        )
        await engine.start()
        self._engines[number] = engine, registry
        # With this limit the HTTP process does not warn of it a second time
        spec = replace(backend.spec, max_input_length=loaded.model.reader.max_input_length)
        remote = RemoteBackend(
            spec,
            backend.name,
            backend.dtype,
            backend.padding,
            tuple(backend.lanes),
            backend.ahead,
            loaded.budget_tokens,
        )
        del loaded
        # The HTTP process tokenises
        memory.collect_as_usual()
        return remote

    async def unload(self, number: int, seconds: float | None) -> list[Reading]:
        engine, registry = self._engines.pop(number)
        await engine.stop(seconds)
        del engine
        await asyncio.to_thread(memory.trim)
        return registry.readings()

    async def run(
        self, number: int, encodings: Any, heads: frozenset[Head], now_ns: int
    ) -> tuple[HeadOutputs, int, int]:
        """Run a request. Return its outputs, and its times summed over its sequences."""
        request = await self._engines[number][0].run(apart(*encodings), heads, now_ns)
        return request.outputs(), request.queue_ns, request.inference_ns

    async def probe(self, number: int) -> None:
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
                task = self._running[number] = asyncio.create_task(
                    self._run(number, getattr(self, method)(*arguments))
                )
                task.add_done_callback(partial(self._forget, number))
            elif number in self._running:
                self._running[number].cancel()

    def _forget(self, number: int, _: asyncio.Task[Any]) -> None:
        self._running.pop(number, None)

    async def _run(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._answer(number, await work)
        except Exception as error:
            # Every error is answered, since the caller waits
            if not isinstance(error, HybridTeiError):
                error = BackendError(f"{type(error).__name__}: {error}")
            self._answer(number, None, error)

    def _answer(self, number: int, value: Any, error: Exception | None = None) -> None:
        if not self._answers:
            # The answers of one pass are sent together
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append((number, value, error))

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        try:
            send(self._connection, answers)
        except OSError:
            _end(0)


def _end(status: int) -> NoReturn:
    """Exit without destructors: those of a runtime abort the process while a pass runs."""
    logging.shutdown()
    os._exit(status)


def main(descriptor: int) -> None:
    """Serve the connection in `sys.argv`."""
    # Terminals and systemd signal this process too, but the HTTP process ends it
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    memory.limit_heaps()
    connection = Connection(descriptor)
    (config, settings), *calls = receive(connection)
    logs.configure(**settings)
    # Not uvloop: it would make the connection non-blocking
    asyncio.run(EngineChild(connection, config).serve(calls))


if __name__ == "__main__":
    main(int(sys.argv[1]))
