"""What HTTP costs: CPU microseconds of the server process for one short `/embed`, over a backend that costs nothing, and for
one that is refused, since no permit is free, to connections that ask again at once.

    python conformance/load/request_cost.py [--rounds 5] [--clients 32,1] [--seconds 3] [--other NAME=FOLDER]

The server is ours with its own settings, the embedded model's tokenizer, and a backend that hands out ready rows. The floor is
bare uvicorn under an application that reads the body and answers a constant as long as ours. Both run one after the other in
each round, so that a noisy machine is noisy to both; `--other` adds our server from another checkout, for before and after.
Prints medians over the rounds, and one line of JSON. CPU time is user and system time of all threads of the server process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import uvloop

TEXT = "what does a hybrid search need"
PACKAGES = ("litestar", "uvicorn", "uvloop", "httptools", "msgspec", "orjson", "tokenizers", "numpy")
ROOT = Path(__file__).parents[2]
GOAL_US, REFUSED_GOAL_US = 200, 20
REFUSED_CLIENTS = 640


def serve(port: int, *, full: bool = False) -> None:
    """Our server, in this process. `full`: no permit is free."""
    import numpy as np

    from hybridtei.backends.fake import FakeBackend
    from hybridtei.batch import PackedBatch
    from hybridtei.checkpoint.spec import ModelSpec
    from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
    from hybridtei.engine.service import EngineService
    from hybridtei.load import find_model
    from hybridtei.observability import logs
    from hybridtei.observability.metrics import Registry
    from hybridtei.outputs import HeadOutputs
    from hybridtei.server.app import create_app
    from hybridtei.server.run import run_server
    from hybridtei.tasks.base import Model
    from hybridtei.text.reader import TextReader
    from hybridtei.text.tokenizer import Prompts, Tokenizer

    class NoCost(FakeBackend):
        """Ready rows: the fake's own arithmetic on 384 columns would cost as much as the server."""

        def __init__(self, spec: ModelSpec) -> None:
            super().__init__(spec)
            self._rows = np.random.default_rng(0).standard_normal((512, spec.dense_width)).astype(np.float32)

        def forward(self, batch: PackedBatch, **_: object) -> HeadOutputs:
            return HeadOutputs(dense=self._rows[: len(batch)])

    spec = find_model(ModelConfig())
    tokenizer = Tokenizer.load(
        spec.folder / "tokenizer.json", has_token_types=spec.has_token_types, settings=spec.tokenizer_settings
    )
    reader = TextReader(tokenizer, Prompts(spec.prompts), spec.max_input_length, spec.vocab_size)
    logs.configure(json_output=False, level="info")  # each request has its line
    registry, config = Registry(), ServerConfig(hostname="127.0.0.1", port=port)
    service = EngineService(Model(spec, reader), NoCost(spec), EngineConfig(), budget_tokens=1024, registry=registry)
    app = create_app(service, config, registry=registry)
    with service.admission.inside(service.admission.permits) if full else nullcontext():
        run_server(app, config)


def serve_floor(port: int, length: int) -> None:
    """The cheapest possible server, in this process."""
    import uvicorn

    body = b"[" + b"0" * (length - 2) + b"]"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", lifespan="off", log_level="error", access_log=False)


def body_of(client: int) -> bytes:
    """A request's body: texts differ between clients, since equal ones that wait together are computed once."""
    return json.dumps({"inputs": f"{TEXT} {client:03}"}).encode()


class Client(asyncio.Protocol):
    """One keep-alive connection, one request at a time. Another status ends the measurement."""

    def __init__(self, number: int, status: int) -> None:
        self._status = b"HTTP/1.1 %d" % status
        body = body_of(number)
        head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._request = head + body
        self.answered = 0
        self._missing = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            head, _, rest = data.partition(b"\r\n\r\n")
            assert head.startswith(self._status), head
            self._missing = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0]) - len(rest)
        else:
            self._missing -= len(data)
        if not self._missing:
            self.answered += 1
            self._transport.write(self._request)

    def close(self) -> None:
        self._transport.abort()


async def load(port: int, clients: int, seconds: float, status: int = 200) -> int:
    """Requests answered."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(partial(Client, number, status), "127.0.0.1", port) for number in range(clients)]
    open_clients = [client for _, client in made]
    await asyncio.sleep(seconds)
    for one in open_clients:
        one.close()
    return sum(one.answered for one in open_clients)


@contextmanager
def started(arguments: list[str], folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """This script as a server, with the package of `folder`: its port and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"does not start: {command}")
            time.sleep(0.05)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(
    arguments: list[str], folder: Path, clients: list[int], seconds: float, status: int = 200
) -> dict[int, tuple[float, float]]:
    """Clients -> (CPU microseconds a request, requests/s) of one server, started for this."""
    found = {}
    with started(arguments, folder) as (port, process):
        for number in clients:
            uvloop.run(load(port, number, 0.7, status))
            before = cpu_seconds(process)
            answered = uvloop.run(load(port, number, seconds, status))
            found[number] = ((cpu_seconds(process) - before) / answered * 1e6, answered / seconds)
    return found


def answer_bytes() -> int:
    """Length of our answer's body."""
    import http.client

    with started([], ROOT) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/embed", body_of(0), {"content-type": "application/json"})
        return len(connection.getresponse().read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", default="32,1")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FOLDER", help="another checkout; repeatable")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server; for this script's own use")
    parser.add_argument("--full", action="store_true", help="with --serve: without a free permit")
    parser.add_argument("--floor", type=int, metavar="BYTES", help="with --serve: be the floor")
    options = parser.parse_args()
    if options.serve and options.floor:
        serve_floor(options.serve, options.floor)
    elif options.serve:
        serve(options.serve, full=options.full)
    else:
        compare(options.rounds, [int(number) for number in options.clients.split(",")], options.seconds, options.other)


def compare(rounds: int, clients: list[int], seconds: float, others: list[str]) -> None:
    """Measure all servers in turn, and report."""
    length = answer_bytes()
    servers: dict[str, tuple[list[str], Path]] = {"floor": (["--floor", str(length)], ROOT), "ours": ([], ROOT)}
    servers |= {name: ([], Path(folder)) for name, folder in (other.split("=", 1) for other in others)}
    for _, folder in servers.values():
        if not (folder / "hybridtei").is_dir():  # the installed package would be measured instead
            sys.exit(f"not a checkout: {folder}")
    runs: dict[str, list[dict[int, tuple[float, float]]]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, (arguments, folder) in servers.items():
            runs[name].append(measure(arguments, folder, clients, seconds))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(", ".join(f"{package} {version(package)}" for package in PACKAGES))
    print(f"answer of {length} bytes; {rounds} rounds of {seconds:g} s; goal {GOAL_US} us a request")
    print(f"{'clients':>7}  {'server':12}{'us CPU a request':>18}{'requests/s':>12}{'x floor':>9}")
    table = {}
    for number in clients:
        for name, found in runs.items():
            cost, rate = (statistics.median(run[number][i] for run in found) for i in range(2))
            ratio = statistics.median(
                run[number][0] / floor[number][0] for run, floor in zip(found, runs["floor"], strict=True)
            )
            print(f"{number:7}  {name:12}{cost:18.1f}{rate:12.0f}{ratio:9.2f}")
            table[f"{number}/{name}"] = {"us": round(cost, 1), "requests_per_s": round(rate), "x_floor": round(ratio, 2)}
    refused = [measure(["--full"], ROOT, [REFUSED_CLIENTS], seconds, 429)[REFUSED_CLIENTS] for _ in range(rounds)]
    cost, rate = (statistics.median(column) for column in zip(*refused, strict=True))
    print(f"{REFUSED_CLIENTS:7}  {'refused':12}{cost:18.1f}{rate:12.0f}   goal {REFUSED_GOAL_US} us")
    table[f"{REFUSED_CLIENTS}/refused"] = {"us": round(cost, 1), "requests_per_s": round(rate)}
    print(json.dumps(table))


if __name__ == "__main__":
    main()
