"""The HTTP process's side of the engine's process: start it, call it, and start it again when it
ends.

The two processes hold the ends of a pair of Unix sockets. The child inherits its end, so there is
no address and no key. Messages are pickles; only this program's own child sends them. Arrays above
`IN_BAND` bytes follow their message unpickled, so a result is copied once, into the receiver's
memory.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, cast

import numpy as np

from hybridtei.batch import Encoding, Head, Ids, Padding
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import HybridTeiError, LoadError, Unhealthy
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.scheduler import EngineRequest
from hybridtei.inference.load import LoadedModel, text_model
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.system import machine
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import LOADED_MODELS, Registry

# Bytes; a smaller array costs less to copy than to send as its own message
IN_BAND = 16_384
# The number of a message that answers no call: the metrics of each model
COUNTED = -1
# Before an ended process is started again
RETRY_SECONDS = 1.0
# For a process to end by itself, or to answer a probe
GRACE_SECONDS = 5.0
MODULE = "hybridtei.server.engine_child"

log = logging.getLogger(__name__)


def send(connection: Connection, message: Any) -> None:
    """Block until the message is written. Raises OSError if the other process has ended."""
    arrays: list[memoryview] = []

    def is_small(array: pickle.PickleBuffer) -> bool:
        if array.raw().nbytes > IN_BAND:
            arrays.append(array.raw())
        return array.raw().nbytes <= IN_BAND

    connection.send_bytes(pickle.dumps(message, 5, buffer_callback=is_small))
    for array in arrays:
        connection.send_bytes(array)


def receive(connection: Connection) -> Any:
    """Block until a message is there, and return it. Raises EOFError or OSError if the other
    process has ended."""
    return pickle.loads(connection.recv_bytes(), buffers=iter(connection.recv_bytes, None))


def joined(encodings: Sequence[Encoding]) -> tuple[Ids, Ids | None, list[tuple[int, ...]]]:
    """Join encodings end to end for another process: ids int64[t], token types, and the numbers of
    each encoding.

    Token types None may become zeros, which mean the same.
    """
    ids = [encoding.input_ids for encoding in encodings]
    numbers: list[tuple[int, ...]] = [
        (len(encoding), encoding.unseen, encoding.adapter, encoding.shared, encoding.route)
        for encoding in encodings
    ]
    types: Ids | None = None
    if any(encoding.token_type_ids is not None for encoding in encodings):
        types = np.concatenate(
            [
                np.zeros_like(encoding.input_ids)
                if encoding.token_type_ids is None
                else encoding.token_type_ids
                for encoding in encodings
            ]
        )
    return np.concatenate(ids), types, numbers


def apart(ids: Ids, types: Ids | None, numbers: Sequence[tuple[int, ...]]) -> list[Encoding]:
    """Split the result of `joined` into encodings that are views."""
    ends = accumulate(length for length, *_ in numbers)
    encodings: list[Encoding] = []
    for end, (length, unseen, adapter, shared, route) in zip(ends, numbers, strict=True):
        part = slice(end - length, end)
        types_of_part = None if types is None else types[part]
        encodings.append(Encoding(ids[part], types_of_part, unseen, adapter, shared, route))
    return encodings


@dataclass(frozen=True, slots=True)
class RemoteBackend:
    """Facts about a backend in the engine's process."""

    spec: ModelSpec
    name: str
    dtype: str
    padding: Padding
    lanes: tuple[LaneKind, ...]
    ahead: int
    budget_tokens: int


class RemoteEngine:
    """An `EngineClient` of the engine's process. That process counts batches; `registry` holds its
    latest counts."""

    # An ended process is started again
    dead = None
    # No pass runs in this process
    busy = False

    def __init__(self, process: EngineProcess, number: int) -> None:
        self.registry = Registry()
        if process.idle_s:
            self.registry.observed(LOADED_MODELS, process.loaded.is_set)
        self._process, self._number = process, number

    async def start(self) -> None:
        self._process.start()

    async def run(
        self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int
    ) -> EngineRequest:
        """Raises the errors of `Engine.run`, and Unhealthy if the process ends meanwhile."""
        request = EngineRequest(encodings, heads, now_ns)
        answer = await self._process.ask("run", self._number, joined(encodings), heads, now_ns)
        outputs, request.queue_ns, request.inference_ns = answer
        request.keep(range(len(encodings)), outputs)
        return request

    async def check_health(self) -> None:
        """Raises the errors of `Engine.check_health`, and Unhealthy if no answer comes within
        `GRACE_SECONDS`. An idle process is healthy."""
        if not self._process.loaded.is_set():
            return
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await self._process.ask("probe", self._number)
        except TimeoutError:
            raise Unhealthy("the engine's process does not answer") from None

    async def stop(self, seconds: float | None = None) -> None:
        """Unload the model."""
        with suppress(Unhealthy, TimeoutError):
            async with asyncio.timeout(None if seconds is None else seconds + GRACE_SECONDS):
                await self._process.unload(self._number, seconds)


class _Child:
    """One process, its connection, and the thread that writes to it, since a full socket must not
    block the event loop."""

    def __init__(self, settings: Any) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                machine.python_command("-m", MODULE, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The same working folder, since configs hold relative paths
                env=machine.child_environment(),
            )
        self._out: SimpleQueue[Any] = SimpleQueue()
        # The writer thread sends all waiting messages together
        self.send = self._out.put
        self.send(settings)
        self._writer = threading.Thread(target=self._write, name="to-engine", daemon=True)
        self._writer.start()

    def end(self) -> str:
        try:
            status = self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._out.put(None)
        self._writer.join()
        self.connection.close()
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    def _write(self) -> None:
        # Raised if the process has ended, which the reader thread handles
        with suppress(OSError):
            while True:
                messages = [self._out.get()]
                with suppress(Empty):
                    while True:
                        messages.append(self._out.get_nowait())
                if None in messages:
                    return
                send(self.connection, messages)


class EngineProcess:
    """The engine's process, restarted when it ends. `settings`: arguments of `logs.configure`.
    `idle_s`: it ends after this time without a request, until the next one; 0: it stays."""

    def __init__(self, engine: EngineConfig, settings: dict[str, Any], idle_s: float = 0) -> None:
        self._engine, self._settings = engine, settings
        # Of the models that every new process loads
        self._configs: dict[int, ModelConfig] = {}
        self._engines: dict[int, RemoteEngine] = {}
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._child: _Child | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Why calls are refused now; "" if they are taken
        self._away = ""
        # Not set from the end of an idle process until the next one has its models
        self.loaded = asyncio.Event()
        self.loaded.set()
        # True: an idle process ends, or has ended, and `_wake` starts the next one
        self._rests = False
        self._wake = threading.Event()
        self.idle_s = idle_s
        self._used_s = 0.0
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="from-engine", daemon=True)

    def load(self, config: ModelConfig) -> tuple[LoadedModel, RemoteEngine]:
        """Load a model and block until it is ready: before `start`, or outside the event loop's
        thread. Raises LoadError, and Unhealthy if a started process ends meanwhile."""
        number = next(self._numbers)
        if self._loop is not None:
            remote = asyncio.run_coroutine_threadsafe(
                self.ask("load", number, config), self._loop
            ).result()
        else:
            try:
                remote = self._now(self._child or self._spawn(), "load", number, config)
            except (EOFError, OSError) as error:
                raise LoadError(
                    f"the engine's process ended ({self._end() or error}) before it had loaded a "
                    "model"
                ) from None
        engine = self._engines[number] = RemoteEngine(self, number)
        self._configs[number] = config
        return LoadedModel(
            text_model(remote.spec, self._engine), cast(Backend, remote), remote.budget_tokens
        ), engine

    async def unload(self, number: int, seconds: float | None) -> None:
        """Unload a model. Wait at most `seconds` for its passes."""
        engine = self._engines.pop(number)
        del self._configs[number]
        # The next process will not load it
        if not self._rests:
            engine.registry.others = await self.ask("unload", number, seconds)

    def start(self) -> None:
        """Begin to take calls from the running event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._keeper.start()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `EngineChild`; return its answer, or raise its error. Cancelling the
        caller cancels the call. Waits for a process that was idle. Raises Unhealthy if the process
        ends, or has ended."""
        while not self.loaded.is_set():
            if self._rests:
                self._wake.set()
            await self.loaded.wait()
        if self._away:
            raise Unhealthy(self._away)
        number, child = next(self._numbers), self._child
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        # Otherwise the process has just ended, and `_switch` will fail this call
        if child is not None:
            child.send((number, method, arguments))
        try:
            return await answer
        except asyncio.CancelledError:
            if child is not None:
                child.send((number, "cancel", ()))
            raise
        finally:
            del self._waiting[number]
            if method != "probe":
                self._used_s = monotonic()

    def close(self) -> None:
        """End the process without a restart, and wait for its end."""
        self._closing.set()
        self._wake.set()
        child = self._child
        if child is not None:
            child.send((0, "stop", ()))
        if self._loop is None:
            self._end()
            return
        self._keeper.join(GRACE_SECONDS)
        if child is not None:
            child.process.kill()
        self._keeper.join()

    def _spawn(self) -> _Child:
        """Start a process with all models. Raises OSError, EOFError, HybridTeiError."""
        child = self._child = _Child((self._engine, self._settings))
        if self._closing.is_set():
            child.process.kill()
        for number, config in [*self._configs.items()]:
            self._now(child, "load", number, config)
        return child

    def _end(self) -> str:
        """Wait for the process to end; kill it after `GRACE_SECONDS`. Return how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.end()

    def _now(self, child: _Child, method: str, *arguments: Any) -> Any:
        """Call the process and read the answer, in the only thread that reads."""
        call = next(self._numbers)
        child.send((call, method, arguments))
        while True:
            for number, value, error in receive(child.connection):
                if error is not None:
                    raise error
                if number == call:
                    return value

    def _keep(self) -> None:
        """Pass answers to the event loop, and replace each ended process."""
        while not self._closing.is_set():
            try:
                child = self._child or self._spawn()
                log.info("the engine's process is %d", child.process.pid)
                self._on_loop(self._switch, "")
                if self.idle_s:
                    self._on_loop(self._look, child)
                while True:
                    self._on_loop(self._answered, receive(child.connection))
            except Exception as error:
                # A message that cannot be read ends the connection, too
                how = self._end() or error
                if self._rests:
                    self._wake.wait()
                    self._wake.clear()
                    self._rests = False
                    continue
                ended = (
                    f"the engine's process ended ({how}) and is started again: "
                    "send the request again"
                )
                if not self._closing.is_set():
                    log.error("%s", error if isinstance(error, HybridTeiError) else ended)
                self._on_loop(self._switch, ended)
                self._closing.wait(RETRY_SECONDS)

    def _look(self, child: _Child) -> None:
        """End the process if it is idle, or look again later."""
        rest_s = self._used_s + self.idle_s - monotonic()
        if child is not self._child:
            return
        if rest_s <= 0 and not self._waiting:
            log.info("the engine's process ends until the next request: it is idle")
            self._rests = True
            self.loaded.clear()
            child.send((0, "stop", ()))
            return
        if rest_s <= 0:
            rest_s = self.idle_s
        asyncio.get_running_loop().call_later(rest_s, self._look, child)

    def _on_loop(self, act: Callable[[Any], object], value: Any) -> None:
        assert self._loop is not None
        # Raised if the event loop is closed
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, value)

    def _switch(self, away: str) -> None:
        """Fail the waiting calls, and refuse later ones with this reason; "": take calls again."""
        self._away = away
        self._used_s = monotonic()
        self.loaded.set()
        for answer in self._waiting.values():
            if away and not answer.done():
                answer.set_exception(Unhealthy(away))
        for engine in self._engines.values():
            engine.registry.keep(engine.registry.others)
            engine.registry.others = ()

    def _answered(self, answers: Sequence[tuple[int, Any, HybridTeiError | None]]) -> None:
        for number, value, error in answers:
            waiting = self._waiting.get(number)
            if number == COUNTED:
                for model in value.keys() & self._engines.keys():
                    self._engines[model].registry.others = value[model]
            elif waiting is not None and not waiting.done():
                waiting.set_result(value) if error is None else waiting.set_exception(error)
