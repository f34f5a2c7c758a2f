"""What a pass waits for the event loop: one that takes the interpreter's lock 400 times, as launching a pass on a GPU does,
alone and while other clients keep HTTP busy.

    python conformance/load/convoy.py [--http-workers 0,1] [--rounds 3] [--seconds 4] [--calls 400]

The server is ours with its own settings, the embedded model's tokenizer, and a fake backend whose pass is a row of calls that
give the lock up and take it again. With `--http-workers 0` the lanes share an interpreter with HTTP; with 1 the engine has a
process of its own. One client asks `/embed` again and again; beside it others send bodies that are no JSON as fast as they are
refused, which costs the engine nothing and the event loop all of its time. A pass's time is the server's own,
`te_request_inference_duration`. Prints medians over the rounds, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from urllib.request import Request, urlopen

import psutil

GOAL = 1.5  # times of a pass alone that it may take beside a busy event loop
NOISY = 8  # connections
BROKEN = b'{"inputs": ["' + b'a hybrid search", "' * 200 + b'"}'
DURATION = re.compile(r"^te_request_inference_duration_(sum|count)\S* (\S+)$", re.MULTILINE)


def serve(port: int, workers: int, calls: int) -> None:
    """Our server; HTTP in this process, or in `workers` beside it."""
    from hybridtei.backends.fake import FakeBackend, launching
    from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
    from hybridtei.engine.service import EngineService
    from hybridtei.load import find_model, text_model
    from hybridtei.observability.metrics import Registry
    from hybridtei.server.app import create_app
    from hybridtei.server.run import run_server
    from hybridtei.server.supervisor import run_workers

    model, engine, registry = ModelConfig(), EngineConfig(), Registry()
    server = ServerConfig(hostname="127.0.0.1", port=port, http_workers=workers)
    spec = find_model(model)
    backend = FakeBackend(spec, gate=launching(calls))
    service = EngineService(text_model(spec, engine), backend, engine, budget_tokens=1024, registry=registry)
    if workers:
        run_workers(service, server, model, registry=registry)
    else:
        run_server(create_app(service, server, model, registry=registry), server)


def make_noise(port: int) -> None:
    """Keep the event loop busy, until killed."""
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BROKEN)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(NOISY)]
    for connection in connections:
        connection.sendall(head + BROKEN)
    while True:
        for connection in connections:
            answer = connection.recv(65536)
            if not answer.startswith(b"HTTP/1.1 4"):
                sys.exit(1)
            connection.sendall(head + BROKEN)


def seconds_and_passes(port: int) -> tuple[float, int]:
    """Of all requests that were served."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = {name: float(value) for name, value in DURATION.findall(answer.read().decode())}
    return found.get("sum", 0.0), int(found.get("count", 0))


def mean_pass_ms(port: int, seconds: float, numbers: Iterator[int]) -> float:
    """Of one client that asks again and again."""
    before = seconds_and_passes(port)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        body = json.dumps({"inputs": f"what does a hybrid search need {next(numbers):06}"}).encode()
        with urlopen(Request(f"http://127.0.0.1:{port}/embed", body, {"content-type": "application/json"})) as answer:
            answer.read()
    total, passes = (after - one for after, one in zip(seconds_and_passes(port), before, strict=True))
    return 1000 * total / passes


@contextmanager
def running(*arguments: str) -> Iterator[psutil.Process]:
    """This script in another process."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def measure(workers: int, calls: int, seconds: float) -> dict[str, float]:
    """One round of one server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = count()
    with running("--serve", str(port), "--http-workers", str(workers), "--calls", str(calls)) as server:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > until or not server.is_running():
                sys.exit("the server does not start")
            time.sleep(0.05)
        mean_pass_ms(port, 0.5, numbers)
        alone = mean_pass_ms(port, seconds, numbers)
        speaks = (server.children() or [server])[0]
        with running("--noise", str(port)) as noise:
            mean_pass_ms(port, 0.5, numbers)
            speaks.cpu_percent()
            beside = mean_pass_ms(port, seconds, numbers)
            busy = speaks.cpu_percent()
            if noise.status() == psutil.STATUS_ZOMBIE:
                sys.exit("the noise has ended: a broken body was not refused")
    return {"alone_ms": alone, "beside_ms": beside, "ratio": beside / alone, "http_cpu_percent": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http-workers", default="0,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--calls", type=int, default=400, help="how often a pass takes the lock")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server; for this script's own use")
    parser.add_argument("--noise", type=int, metavar="PORT", help="keep a server's event loop busy; for this script's own use")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, int(options.http_workers), options.calls)
        return
    if options.noise:
        make_noise(options.noise)
    shapes = [int(number) for number in options.http_workers.split(",")]
    runs: dict[int, list[dict[str, float]]] = {workers: [] for workers in shapes}
    for _ in range(options.rounds):
        for workers in shapes:
            runs[workers].append(measure(workers, options.calls, options.seconds))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'HTTP workers':>12}{'pass alone ms':>15}{'beside ms':>11}{'x alone':>9}{'CPU of HTTP':>13}   goal {GOAL}")
    table = {}
    for workers, found in runs.items():
        row = {name: statistics.median(run[name] for run in found) for name in found[0]}
        print(f"{workers:12}{row['alone_ms']:15.2f}{row['beside_ms']:11.2f}{row['ratio']:9.2f}{row['http_cpu_percent']:12.0f}%")
        table[str(workers)] = {name: round(value, 2) for name, value in row.items()}
    print(json.dumps(table))


if __name__ == "__main__":
    main()
