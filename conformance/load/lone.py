"""One client that waits for each answer: how long a lone request takes, ours beside a peer, in turns of a few requests.

    python conformance/load/lone.py --server 'ours=hybridtei serve --hostname 127.0.0.1 --port {port}' \\
        --server 'peer=python peer.py {port}' [--route embed|rerank] [--sizes 6,40,120] [--mixed] [--turns 40]

All servers run at once and only one is asked at a time, so that whatever else the machine does meets all of them. `--sizes`:
words of the text for /embed, texts of 60 words of one query for /rerank; with `--mixed`, of 5 to 30 words for 70 % of these
and 100 to 250 for the rest. Every text is new. Prints the median and the 95th
percentile of each server in ms, and the first server's median as a share of each other's: below 1, ours is sooner.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

TURN = 15  # requests to one server, before the next has its turn
START_SECONDS = 120
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("search", "vector", "wing", "plate", "the", "of", "boundary", "layer", "flow", "heat", "index", "query", "in", "text")


class Server:
    """A server under measurement, by one connection."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)

    def ask(self, route: str, body: bytes) -> float:
        """Seconds until the whole answer is there. Raises RuntimeError unless it is 200."""
        began = time.perf_counter()
        self._connection.request("POST", f"/{route}", body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{self.name}: {answer.status} {content[:200]!r}")
        return time.perf_counter() - began

    def disconnect(self) -> None:
        """The next request opens a connection: servers close one that had nothing to do for some seconds."""
        self._connection.close()


def main() -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--route", choices=["embed", "rerank"], default="embed")
    parser.add_argument("--sizes", help="words of a text, or texts of a request; separated by commas")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--mixed", action="store_true", help="texts to rank are of many lengths")
    options = parser.parse_args()
    named = options.sizes or {"embed": "6,40,120", "rerank": "1,10,32"}[options.route]
    sizes = [int(size) for size in named.split(",")]
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    with ExitStack() as stack:
        servers = [stack.enter_context(started(*one.split("=", 1), route=options.route)) for one in options.server]
        for size in sizes:
            report(options.route, size, measured(servers, options.route, size, options.turns, mixed=options.mixed))
    return 0


def measured(servers: list[Server], route: str, size: int, turns: int, *, mixed: bool) -> dict[str, list[float]]:
    """Milliseconds of each request, by server; the first of a turn is left out."""
    draw = random.Random(size)
    found: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in range(turns):
        for server in draw.sample(servers, len(servers)):
            server.disconnect()
            times = [1e3 * server.ask(route, body_of(route, size, draw, mixed=mixed)) for _ in range(TURN)]
            found[server.name] += times[1:]
    return found


def report(route: str, size: int, found: dict[str, list[float]]) -> None:
    """One line a server."""
    ours = statistics.median(next(iter(found.values())))
    for name, times in found.items():
        median, late = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        figures = f"p50 {median:8.2f} ms  p95 {late:8.2f} ms  first/this {ours / median:6.3f}"
        print(f"/{route} {size:4}  {name:12} {figures}", flush=True)


def body_of(route: str, size: int, draw: random.Random, *, mixed: bool = False) -> bytes:
    """A request that was not asked before."""
    if route == "embed":
        return json.dumps({"inputs": text(size, draw), "truncate": True}).encode()
    words = [(draw.randint(5, 30) if draw.random() < 0.7 else draw.randint(100, 250)) if mixed else 60 for _ in range(size)]
    return json.dumps({"query": text(6, draw), "texts": [text(count, draw) for count in words], "truncate": True}).encode()


def text(words: int, draw: random.Random) -> str:
    """Known words, and one that is new."""
    return " ".join([*draw.choices(WORDS, k=words - 1), "".join(draw.choices(LETTERS, k=5))])


@contextmanager
def started(name: str, command: str, *, route: str) -> Iterator[Server]:
    """A server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = shlex.split(command.replace("{port}", str(port)))
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        began, draw = time.perf_counter(), random.Random(0)
        while True:
            server = Server(name, port)
            try:
                server.ask(route, body_of(route, 6 if route == "embed" else 1, draw))
                break
            except (OSError, http.client.HTTPException, RuntimeError):
                if process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                    raise SystemExit(f"{name} did not come up: {command}") from None
                time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(START_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
