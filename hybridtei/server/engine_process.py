"""The engine's process as the HTTP process has it: started, asked, and started again when it ends.

Each holds one end of a pair of Unix sockets. The child inherits its end: there is no address to connect to, and no key to keep.
Messages are pickles, from this program's own child alone. Arrays above `IN_BAND` bytes follow their message as they are: a
result is copied once, into the memory that receives it.
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
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, cast

from hybridtei.batch import Encoding, Head, Padding
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import HybridTeiError, LoadError, Unhealthy
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.scheduler import EngineRequest, joined
from hybridtei.inference.load import LoadedModel, text_model
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.system import machine
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import Registry

IN_BAND = 16_384  # bytes: copying a smaller array costs less than a message of its own
COUNTED = -1  # the number of an answer to no call: the metrics of each model
RETRY_SECONDS = 1.0  # until a process that ended is started again
GRACE_SECONDS = 5.0  # for a process to end by itself, and for one to answer a probe
MODULE = "hybridtei.server.engine_child"

log = logging.getLogger(__name__)


def send(connection: Connection, message: Any) -> None:
    """Block until the message is written. Raises OSError if the other end is gone."""
    arrays: list[memoryview] = []

    def is_small(array: pickle.PickleBuffer) -> bool:
        if array.raw().nbytes > IN_BAND:
            arrays.append(array.raw())
        return array.raw().nbytes <= IN_BAND

    connection.send_bytes(pickle.dumps(message, 5, buffer_callback=is_small))
    for array in arrays:
        connection.send_bytes(array)


def receive(connection: Connection) -> Any:
    """Block until a message is there, and return it. Raises EOFError, OSError if the other end is gone."""
    return pickle.loads(connection.recv_bytes(), buffers=iter(connection.recv_bytes, None))


@dataclass(frozen=True, slots=True)
class RemoteBackend:
    """What there is to know of a backend in the engine's process."""

    spec: ModelSpec
    name: str
    dtype: str
    padding: Padding
    lanes: tuple[LaneKind, ...]
    ahead: int
    budget_tokens: int


class RemoteEngine:
    """See `engine.engine.EngineClient`. Batches are counted in the engine's process, and told in `registry`."""

    dead = None  # a process that ends is started again
    busy = False  # no pass runs in this process

    def __init__(self, process: EngineProcess, number: int) -> None:
        self.registry = Registry()
        self._process, self._number = process, number

    async def start(self) -> None:
        self._process.start()

    async def run(self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int) -> EngineRequest:
        """See `Engine.run`. Raises Unhealthy if the process ends meanwhile."""
        request = EngineRequest(encodings, heads, now_ns)
        answer = await self._process.ask("run", self._number, joined(encodings), heads, now_ns)
        outputs, request.queue_ns, request.inference_ns = answer
        request.keep(range(len(encodings)), outputs)
        return request

    async def check_health(self) -> None:
        """See `Engine.check_health`. Raises Unhealthy also if the process does not answer within `GRACE_SECONDS`."""
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
    """One process, its connection, and the thread that writes to it: a full socket must not stop the event loop."""

    def __init__(self, settings: Any) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                machine.python_command("-m", MODULE, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=machine.child_environment(),  # in this folder: it opens the same relative paths
            )
        self._out: SimpleQueue[Any] = SimpleQueue()
        self.send = self._out.put  # written soon, together with others that wait
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
        with suppress(OSError):  # it is gone, as the reader learns
            while True:
                messages = [self._out.get()]
                with suppress(Empty):
                    while True:
                        messages.append(self._out.get_nowait())
                if None in messages:
                    return
                send(self.connection, messages)


class EngineProcess:
    """The engine's process, and those that follow it. `settings`: of `logs.configure`."""

    def __init__(self, engine: EngineConfig, settings: dict[str, Any]) -> None:
        self._engine, self._settings = engine, settings
        self._configs: dict[int, ModelConfig] = {}  # of the models that a new process loads
        self._engines: dict[int, RemoteEngine] = {}
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._child: _Child | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._away = ""  # why no call is taken now
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="from-engine", daemon=True)

    def load(self, config: ModelConfig) -> tuple[LoadedModel, RemoteEngine]:
        """Load a model, and block until then: before `start`, or in another thread than the event loop's. Raises LoadError;
        Unhealthy if a process ends that had started."""
        number = next(self._numbers)
        if self._loop is not None:
            found = asyncio.run_coroutine_threadsafe(self.ask("load", number, config), self._loop).result()
        else:
            try:
                found = self._now(self._child or self._spawn(), "load", number, config)
            except (EOFError, OSError) as error:
                raise LoadError(f"the engine's process ended ({self._end() or error}) before it had loaded a model") from None
        engine = self._engines[number] = RemoteEngine(self, number)
        self._configs[number] = config
        return LoadedModel(text_model(found.spec, self._engine), cast(Backend, found), found.budget_tokens), engine

    async def unload(self, number: int, seconds: float | None) -> None:
        """Unload a model, and let its passes end, for at most `seconds`."""
        engine = self._engines.pop(number)
        del self._configs[number]
        engine.registry.others = await self.ask("unload", number, seconds)

    def start(self) -> None:
        """Take calls from the running event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._keeper.start()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `EngineChild`; return its answer, or raise its error. Cancelling the caller cancels the call. Raises
        Unhealthy if the process ends, or has ended."""
        if self._away:
            raise Unhealthy(self._away)
        number, child = next(self._numbers), self._child
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if child is not None:  # else it has just ended, and `_switch` comes
            child.send((number, method, arguments))
        try:
            return await answer
        except asyncio.CancelledError:
            if child is not None:
                child.send((number, "cancel", ()))
            raise
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """End the process for good, and wait until then."""
        self._closing.set()
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
        """Wait for the process to end, kill it after `GRACE_SECONDS`; return how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.end()

    def _now(self, child: _Child, method: str, *arguments: Any) -> Any:
        """The answer to a call, in the one thread that reads."""
        call = next(self._numbers)
        child.send((call, method, arguments))
        while True:
            for number, value, error in receive(child.connection):
                if error is not None:
                    raise error
                if number == call:
                    return value

    def _keep(self) -> None:
        """Give answers to the event loop, and replace each process that ends."""
        while not self._closing.is_set():
            try:
                child = self._child or self._spawn()
                log.info("the engine's process is %d", child.process.pid)
                self._on_loop(self._switch, "")
                while True:
                    self._on_loop(self._answered, receive(child.connection))
            except Exception as error:  # a message that cannot be read ends the connection, too
                ended = f"the engine's process ended ({self._end() or error}) and is started again: send the request again"
                if not self._closing.is_set():
                    log.error("%s", error if isinstance(error, HybridTeiError) else ended)
                self._on_loop(self._switch, ended)
                self._closing.wait(RETRY_SECONDS)

    def _on_loop(self, act: Callable[[Any], object], value: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(act, value)

    def _switch(self, away: str) -> None:
        """Fail the calls that wait, and take none from now on; with "", take calls again."""
        self._away = away
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
