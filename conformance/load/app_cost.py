"""What one `/embed` costs from the client's bytes to the answer's, in one thread and without
sockets.

    python -m conformance.load app_cost [--rounds 5] [--requests 400] [--words 6] [--against FOLDER]

Protocol, application and service are the server's own. The transport keeps the answer's bytes, and
the engine answers at once, so the figure is the CPU of parsing, routing, checks, tokenising,
metrics and writing. It repeats within three percent.
`--against`: a checkout to compare with, in turns; `x first` is the median of the rounds' ratios to
it.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from uvicorn.server import ServerState

from conformance.load.report import medians, paired, ratio, table
from hybridtei.batch import Encoding, Head, Padding
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.scheduler import EngineRequest
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import default_alias, find_model, text_model
from hybridtei.outputs import HeadOutputs
from hybridtei.server.app import context_for, create_models_app
from hybridtei.server.models import Models
from hybridtei.server.run import settings_of
from hybridtei.system.machine import both_lanes
from hybridtei.system.metrics import Registry

ROOT = Path(__file__).parents[2]
FLAGS = {"app_cost": {"--rounds": 5, "--requests": 400, "--words": 6, "--against": ""}}
WORDS = ("retrieval", "ranks", "passages", "of", "text", "by", "meaning")
# Blocks of requests a process; the first ones warm the caches, so the fastest counts
BLOCKS = 6
UNIT = "us CPU a request"


class Idle(Backend):
    """A backend that is never asked."""

    name, dtype, padding, busy_tokens, lanes = "ort", "float32", Padding.NONE, 256, both_lanes(2)


class ReadyEngine:
    """Answers at once, with ones. See `EngineClient`."""

    dead, busy = None, False

    def __init__(self, width: int) -> None:
        self._width = width

    async def start(self) -> None: ...

    async def stop(self, seconds: float | None = None) -> None: ...

    async def check_health(self) -> None: ...

    async def run(
        self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int
    ) -> EngineRequest:
        request = EngineRequest(encodings, heads, now_ns)
        rows = np.ones((len(encodings), self._width), np.float32)
        request.keep(range(len(encodings)), HeadOutputs(dense=rows))
        return request


class Keeping(asyncio.Transport):
    """A transport that keeps what is written. `on_write`: called for each write."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.written: list[Any] = []
        self.on_write: Callable[[], object] = lambda: None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def write(self, data: Any) -> None:
        self.written.append(data)
        self.on_write()

    def writelines(self, parts: Any) -> None:
        self.written += parts
        self.on_write()


async def measure(requests: int, words: int) -> float:
    """CPU microseconds a request, of the fastest block."""
    model, server, engine, registry = ModelConfig(), ServerConfig(), EngineConfig(), Registry()
    spec = find_model(model)
    ready: Any = ReadyEngine(spec.dense_width)
    service = EngineService(
        text_model(spec, engine), Idle(spec), engine, budget_tokens=256, engine=ready
    )
    context = context_for(service, server, model, registry)
    app = create_models_app(Models({default_alias(model.model_id): context}), server)
    async with app.lifespan():
        settings = settings_of(app, server, app.state.limits)
        settings.load()
        make: Any = settings.http_protocol_class
        protocol = make(config=settings, server_state=ServerState(), app_state={})
        transport = Keeping()
        protocol.connection_made(transport)
        text = " ".join([*WORDS * (words // len(WORDS) + 1)][:words])
        # What is made once does not count
        gc.collect()
        gc.freeze()
        blocks = [await run_block(protocol, transport, text, requests, i) for i in range(BLOCKS)]
        answer = b"".join(map(bytes, transport.written))
        assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    return min(blocks)


async def run_block(
    protocol: Any, transport: Keeping, text: str, requests: int, block: int
) -> float:
    """CPU microseconds a request. Each has a text of its own."""
    loop = asyncio.get_running_loop()
    began = time.process_time()
    for number in range(requests):
        body = json.dumps({"inputs": f"{text} {block} {number}"}).encode()
        head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        done = loop.create_future()
        transport.written.clear()
        transport.on_write = partial(_finish, done)
        protocol.data_received(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await done
        await asyncio.sleep(0)
    return (time.process_time() - began) / requests * 1e6


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def run_checkout(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """The figure of a checkout's package, measured by this file in a process of its own."""
    command = [sys.executable, __file__, str(options.requests), str(options.words)]
    path = os.pathsep.join([str(folder), str(ROOT)])
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {UNIT: float(ended.stdout.splitlines()[-1])}


def app_cost(options: argparse.Namespace) -> int:
    folders = {"ours": ROOT}
    if options.against:
        folders = {"against": Path(options.against).resolve(), **folders}
    sides = {name: partial(run_checkout, folder, options) for name, folder in folders.items()}
    runs = paired(options.rounds, sides)
    first = [run[UNIT] for run in next(iter(runs.values()))]
    table(
        {
            name: {**medians(side), "x first": ratio([run[UNIT] for run in side], first)}
            for name, side in runs.items()
        }
    )
    return 0


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("hybridtei").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(runner.run(measure(int(sys.argv[1]), int(sys.argv[2]))))
