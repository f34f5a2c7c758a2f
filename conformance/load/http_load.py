"""Named traffic against embedding servers over HTTP: useful tokens/s, requests/s, latencies, CPU time, memory.

    python conformance/load/http_load.py \\
        --server 'ours=hybridtei serve --hostname 127.0.0.1 --port {port}' \\
        --server 'peer=python peer.py {port}' [--traffic mixed,queries] [--rounds 3] [--seconds 8]

Servers are started one after the other, alternating over the rounds, so that a noisy machine is noisy to all; the first one
named is what the others are divided by. `--url NAME=http://…` measures a server that runs already, without CPU and memory.
Useful tokens are counted with the embedded model's tokenizer, special tokens included, no padding; no text is sent twice in one
measurement by two clients at once, so nobody profits from repetition. The share of peak is against float32 matrix products of
this machine, measured between the rounds. Prints medians over the rounds, and one line of JSON. `--chart FILE` writes what
`notebooks/draw.py` draws; kinds of traffic that it has already stay, so that short runs make one chart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import numpy as np
import orjson
import psutil
import uvloop
from tokenizers import Tokenizer

from hybridtei.checkpoint.files import embedded_model

QUERY, PASSAGE = (5, 30), (100, 250)


@dataclass(frozen=True)
class Clients:
    """`number` connections, each sending `texts` texts a request, of lengths drawn from `mix` (share, (low, high))."""

    number: int
    texts: int
    mix: tuple[tuple[float, tuple[int, int]], ...]


MIXED = ((0.7, QUERY), (0.3, PASSAGE))
TRAFFIC: dict[str, tuple[Clients, ...]] = {
    "mixed": (Clients(32, 1, MIXED),),
    "queries": (Clients(32, 1, ((1.0, QUERY),)),),
    "passages": (Clients(16, 1, ((1.0, PASSAGE),)),),
    "bulk": (Clients(2, 32, MIXED),),
    "bulk 32 x 32": (Clients(32, 32, MIXED),),
    "bulk 4": (Clients(4, 32, MIXED),),
    "one client": (Clients(1, 1, ((1.0, QUERY),)),),
    # Latencies are those of the first group.
    "query under bulk": (Clients(1, 1, ((1.0, QUERY),)), Clients(4, 32, MIXED)),
}


@dataclass
class Tally:
    """One group of clients' results."""

    tokens: int = 0
    requests: int = 0
    failures: int = 0
    latencies_ms: list[float] = field(default_factory=list)


class Texts:
    """Texts of a wanted number of tokens, made of words that are one token each."""

    def __init__(self, seed: int = 0) -> None:
        tokenizer = Tokenizer.from_file(str(embedded_model()[0] / "tokenizer.json"))
        self._words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
        self._random = random.Random(seed)

    def draw(self, mix: Sequence[tuple[float, tuple[int, int]]]) -> tuple[str, int]:
        """(text, its tokens with the two special ones)."""
        (low, high) = self._random.choices([bounds for _, bounds in mix], [share for share, _ in mix])[0]
        tokens = self._random.randint(low, high)
        return " ".join(self._random.choices(self._words, k=tokens - 2)), tokens

    def request(self, clients: Clients, host: str) -> tuple[bytes, int]:
        """(bytes of a whole HTTP request, useful tokens in it)."""
        drawn = [self.draw(clients.mix) for _ in range(clients.texts)]
        texts = [text for text, _ in drawn]
        body = orjson.dumps({"inputs": texts if clients.texts > 1 else texts[0]})
        head = f"POST /embed HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body, sum(tokens for _, tokens in drawn)


class Connection(asyncio.Protocol):
    """One client, kept alive, one request at a time. Only what ends in time counts."""

    def __init__(self, requests: list[tuple[bytes, int]], until: float, tally: Tally) -> None:
        self._requests, self._until, self._tally = requests, until, tally
        self._turn = random.Random(id(self)).randrange(len(requests))
        self._answer = bytearray()
        self._size: int | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._size is None and (end := self._answer.find(b"\r\n\r\n")) >= 0:
            length = self._answer[:end].lower().split(b"content-length:")[1].split(b"\r\n")[0]
            self._size = end + 4 + int(length)
        if self._size is not None and len(self._answer) >= self._size:
            self._count(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        request, self._tokens = self._requests[self._turn % len(self._requests)]
        self._turn += 1
        self._began = time.perf_counter()
        self._transport.write(request)

    def _count(self, ended: float) -> None:
        if ended > self._until:
            self.ended.set_result(None)
            self._transport.close()
            return
        if b" 200 " in self._answer[:15]:
            self._tally.requests += 1
            self._tally.tokens += self._tokens
            self._tally.latencies_ms.append((ended - self._began) * 1000)
        else:
            self._tally.failures += 1
        self._answer.clear()
        self._size = None
        self._send()


async def load(url: str, groups: Sequence[Clients], seconds: float, texts: Texts) -> list[Tally]:
    """All groups at once; a tally for each. Each client has texts of its own."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    prepared = [
        [[texts.request(group, host) for _ in range(64 if group.texts == 1 else 12)] for _ in range(group.number)]
        for group in groups
    ]
    tallies = [Tally() for _ in groups]
    until = time.perf_counter() + seconds
    connections = [
        Connection(requests, until, tally) for of_client, tally in zip(prepared, tallies, strict=True) for requests in of_client
    ]
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.create_connection(lambda one=one: one, host, port) for one in connections))
    await asyncio.gather(*(one.ended for one in connections))
    return tallies


FLOP_PER_TOKEN = 21.3e6  # of all-MiniLM-L6-v2 without attention's products: twice its 10.6 M weights


def gemm_peak() -> float:
    """FLOP/s of float32 matrix products over all cores; the best of a second, since others only ever slow it down."""
    size, best, until = 1024, 0.0, time.perf_counter() + 1.0
    a = np.random.default_rng(0).random((size, size), dtype=np.float32)
    while time.perf_counter() < until:
        began = time.perf_counter()
        a @ a
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


@contextmanager
def started(command: str, stderr: int | None = subprocess.DEVNULL) -> Iterator[tuple[str, psutil.Process]]:
    """A server on a free port, ready to answer. `stderr`: as `Popen` takes it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        deadline = time.monotonic() + 180
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"does not start: {command}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def used(process: psutil.Process) -> tuple[float, float]:
    """(CPU seconds, resident MB) of a server and its children."""
    everyone = [process, *process.children(recursive=True)]
    cpu = sum(sum(one.cpu_times()[:2]) for one in everyone)
    return cpu, sum(one.memory_info().rss for one in everyone) / 1e6


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


def measure(url: str, name: str, seconds: float, process: psutil.Process | None) -> dict[str, float]:
    """One traffic against one server."""
    groups = TRAFFIC[name]
    texts = Texts()
    uvloop.run(load(url, groups, min(1.5, seconds), texts))
    before = used(process)[0] if process else 0.0
    own = time.process_time()
    tallies = uvloop.run(load(url, groups, seconds, texts))
    generator = time.process_time() - own
    cpu, memory = used(process) if process else (0.0, 0.0)
    first = tallies[0]
    return {
        "tokens_per_s": sum(tally.tokens for tally in tallies) / seconds,
        "requests_per_s": sum(tally.requests for tally in tallies) / seconds,
        "p50_ms": percentile(first.latencies_ms, 0.5),
        "p95_ms": percentile(first.latencies_ms, 0.95),
        "p99_ms": percentile(first.latencies_ms, 0.99),
        "failures": float(sum(tally.failures for tally in tallies)),
        "cpu_s": cpu - before,
        "generator_cpu_s": generator,
        "rss_mb": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="with {port} in it; repeatable")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="repeatable")
    parser.add_argument("--traffic", default=",".join(TRAFFIC), help=f"of: {', '.join(TRAFFIC)} [default: all]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--chart", type=Path, help="JSON file of tokens per second, for notebooks/draw.py")
    options = parser.parse_args()
    servers = dict(entry.split("=", 1) for entry in options.server)
    urls = dict(entry.split("=", 1) for entry in options.url)
    traffic = options.traffic.split(",")
    peaks: list[float] = []
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        peaks.append(gemm_peak())
        for name, command in servers.items():
            with started(command) as (url, process):
                for kind in traffic:
                    runs.setdefault((kind, name), []).append(measure(url, kind, options.seconds, process))
        for name, url in urls.items():
            for kind in traffic:
                runs.setdefault((kind, name), []).append(measure(url, kind, options.seconds, None))
    report(runs, [*servers, *urls], traffic, max(peaks))
    if options.chart is not None:
        write_chart(options.chart, runs)


def write_chart(path: Path, runs: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    """The machine, and each server's median of tokens per second by kind of traffic; kinds that the file has already stay."""
    rows: dict[str, dict[str, float]] = dict(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.exists() else {}
    for (kind, name), found in runs.items():
        rows.setdefault(name, {})[kind] = round(statistics.median(run["tokens_per_s"] for run in found), 1)
    machine = f"{cpu_name()}, {os.cpu_count()} cores; {time.strftime('%B %Y')}"
    path.write_text(json.dumps({"machine": machine, "rows": [*rows.items()]}, indent=1) + "\n", encoding="utf-8")


def cpu_name() -> str:
    """As the kernel spells the processor's model, or its architecture."""
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


def report(
    runs: dict[tuple[str, str], list[dict[str, float]]], names: Sequence[str], traffic: Sequence[str], peak: float
) -> None:
    medians = {key: {what: statistics.median(run[what] for run in found) for what in found[0]} for key, found in runs.items()}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"float32 matrix products: {peak / 1e9:.0f} GFLOP/s")
    print(
        f"{'traffic':18}{'server':14}{'tokens/s':>10}{'of peak':>9}{'requests/s':>12}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}"
        f"{'CPU s':>8}{'RSS MB':>8}{'ratio':>8}"
    )
    for kind in traffic:
        base = medians[kind, names[0]]["tokens_per_s"]
        for name in names:
            row = medians[kind, name]
            ratio = base / row["tokens_per_s"] if row["tokens_per_s"] else float("nan")
            print(
                f"{kind:18}{name:14}{row['tokens_per_s']:10.0f}{row['tokens_per_s'] * FLOP_PER_TOKEN / peak:9.0%}"
                f"{row['requests_per_s']:12.1f}{row['p50_ms']:9.1f}{row['p95_ms']:9.1f}{row['p99_ms']:9.1f}"
                f"{row['cpu_s']:8.1f}{row['rss_mb']:8.0f}{ratio:8.2f}"
            )
    print(json.dumps({f"{kind}/{name}": {k: round(v, 2) for k, v in row.items()} for (kind, name), row in medians.items()}))


if __name__ == "__main__":
    main()
