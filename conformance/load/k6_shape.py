"""The traffic of TEI's own load tests (k6, `load_tests/`), for as long as asked, against `hybridtei serve`.

    python conformance/load/k6_shape.py [--seconds 300] [--share 0.5 | --rate 1000] [--what http,texts,grpc,stream]

As there: `POST /` with one long text and `"truncate": true` at a constant rate of arrival, whatever the answers take; each of
up to `--clients` (5,000) keeps its connection; an arrival that finds no client free is given up, and counted; 200 is checked,
and the times in the headers are gathered. `grpc` is `Embed` in the same way, `stream` is one `EmbedStream` of many messages.
`texts` is what TEI does not do: every request has a text of its own, since one text that waits many times over is computed
once here. A connection that the server closed after long idleness is opened again, as k6 does.
The rate is `--share` of what eight clients reach just before (TEI's 1,000 a second are meant for a GPU). Exits with 1 if one
request fails, or is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from http_load import Texts
from promises import Report, milliseconds
from quiet import inside, settled
from raw_http import Address, Connection, connect, request
from served import Served, served

HEADERS = ("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")
LONG = ((1.0, (500, 501)),)  # tokens, as of TEI's text; the embedded model takes 256 of them
CLOSED_CLIENTS, CLOSED_SECONDS = 8, 4.0
DISTINCT = 2000  # texts of their own, after which the first comes again
GRACE_SECONDS = 30.0

Ask = Callable[[], Awaitable[Mapping[str, str]]]


class Failed(Exception):
    """No valid answer."""


@dataclass
class Trends:
    """The figures that k6 prints. Times from the headers in milliseconds, those of whole requests in seconds."""

    planned: int = 0
    given_up: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)
    told: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in HEADERS})
    clients: int = 0

    def add(self, headers: Mapping[str, str], seconds: float) -> None:
        self.took.append(seconds)
        for name in HEADERS:
            self.told[name].append(float(headers[name]))


class Clients:
    """A pool: each client is made when none is free, up to a bound, and does one thing at a time."""

    def __init__(self, make: Callable[[], Awaitable[Ask]], most: int) -> None:
        self._make = make
        self._most = most
        self._free: list[Ask] = []
        self.made = 0

    async def take(self) -> Ask | None:
        if self._free:
            return self._free.pop()
        if self.made >= self._most:
            return None
        self.made += 1
        return await self._make()

    def give_back(self, client: Ask) -> None:
        self._free.append(client)


async def constant_arrival(clients: Clients, rate: float, seconds: float) -> Trends:
    """Begin `rate` a second, evenly, and wait for what was begun."""
    trends = Trends(planned=int(rate * seconds))
    running: set[asyncio.Task[None]] = set()

    async def one() -> None:
        began = time.perf_counter()
        client = await clients.take()
        if client is None:
            trends.given_up += 1
            return
        try:
            trends.add(await client(), time.perf_counter() - began)
        except Exception as error:  # whatever it is: k6 counts it as a failed request
            trends.failed[f"{type(error).__name__}: {error}"[:80]] += 1
        finally:
            clients.give_back(client)

    start = time.perf_counter()
    for place in range(trends.planned):
        ahead = start + place / rate - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        task = asyncio.ensure_future(one())
        running.add(task)
        task.add_done_callback(running.discard)
    if running:
        _, late = await asyncio.wait(running, timeout=GRACE_SECONDS)
        if late:
            trends.failed["no answer"] += len(late)
    trends.clients = clients.made
    return trends


async def capacity(make: Callable[[], Awaitable[Ask]]) -> float:
    """Requests a second of some clients that each wait for their answer."""
    until, done = time.perf_counter() + CLOSED_SECONDS, 0

    async def one() -> None:
        nonlocal done
        client = await make()
        while time.perf_counter() < until:
            await client()
            done += 1

    await asyncio.gather(*(one() for _ in range(CLOSED_CLIENTS)))
    return done / CLOSED_SECONDS


def over_http(address: Address, texts: Sequence[str], opened: set[Connection]) -> Callable[[], Awaitable[Ask]]:
    """Clients of `POST /`. `opened`: connections that somebody has to close in the end."""
    requests = [request(address, "/", {"inputs": text, "truncate": True}) for text in texts]
    turn = 0

    async def make() -> Ask:
        connection = await connect(address)
        opened.add(connection)

        async def ask() -> Mapping[str, str]:
            nonlocal turn, connection
            turn += 1
            if connection.ended:
                opened.discard(connection)
                connection = await connect(address)
                opened.add(connection)
            answer = await connection.ask(requests[turn % len(requests)])
            if answer.status != 200:
                raise Failed(str(answer.status))
            return answer.headers

        return ask

    return make


async def http(report: Report, name: str, server: Served, texts: Sequence[str], options: argparse.Namespace) -> None:
    opened: set[Connection] = set()
    address = Address(server.host, server.port)
    try:
        await arrivals(report, name, server, over_http(address, texts, opened), options)
    finally:
        for connection in opened:
            connection.drop()


async def grpc(report: Report, server: Served, texts: Sequence[str], options: argparse.Namespace) -> None:
    from k6_rpc import over_grpc

    async with over_grpc(server.rpc_port, texts[0]) as make:
        await arrivals(report, "gRPC Embed, one text", server, make, options)


async def stream(report: Report, server: Served, texts: Sequence[str], options: argparse.Namespace) -> None:
    from k6_rpc import one_stream

    began = time.perf_counter()
    answers = await one_stream(server.rpc_port, texts[0], options.messages)
    seconds = time.perf_counter() - began
    report.add(
        "gRPC EmbedStream, one stream, one text",
        f"{options.messages} messages",
        f"{answers} answers in {seconds:.1f} s ({answers / seconds:.0f}/s)",
        answers == options.messages,
    )


async def arrivals(
    report: Report, name: str, server: Served, make: Callable[[], Awaitable[Ask]], options: argparse.Namespace
) -> None:
    """A row: what came of a constant rate of arrival."""
    most = await capacity(make)
    rate = options.rate or options.share * most
    before = server.held()
    trends = await constant_arrival(Clients(make, options.clients), rate, options.seconds)
    quiet = await settled(Address(server.host, server.port))
    after = server.held()
    answered, failed = len(trends.took), sum(trends.failed.values())
    times = ", ".join(f"{header[2:-5]} {_trend(trends.told[header])}" for header in HEADERS)
    whole = f"{milliseconds(trends.took):.0f}/{milliseconds(trends.took, 0.95):.0f}"
    why = f" ({', '.join(trends.failed)})" if failed else ""
    report.add(
        name,
        f"{rate:.0f}/s for {options.seconds:.0f} s",
        f"{answered} of {trends.planned} answered with 200, {failed} failed{why}, {trends.given_up} given up, at most "
        f"{trends.clients} clients; ms p50/p95: whole {whole}, {times}; "
        f"memory {before.rss_mb:.0f} → {after.rss_mb:.0f} MB, handles {before.handles} → {after.handles}, "
        f"{inside(quiet.values):.0f} left inside (eight clients alone: {most:.0f}/s)",
        answered == trends.planned and not failed and quiet.seconds is not None and not server.unforeseen(),
    )


def _trend(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.0f}/{sorted(values)[int(len(values) * 0.95)]:.0f}"


async def run(server: Served, options: argparse.Namespace) -> Report:
    report, drawn = Report(), Texts()
    texts = [drawn.draw(LONG)[0] for _ in range(DISTINCT)]
    if "http" in options.what:
        await http(report, "POST /, one text", server, texts[:1], options)
    if "texts" in options.what:
        await http(report, "POST /, texts of their own", server, texts, options)
    if "grpc" in options.what:
        await grpc(report, server, texts, options)
    if "stream" in options.what:
        await stream(report, server, texts, options)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--rate", type=float, default=None, help="a second, instead of --share")
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--messages", type=int, default=2000, help="of the stream")
    parser.add_argument("--what", type=lambda given: given.split(","), default=["http"], metavar="http,texts,grpc,stream")
    options = parser.parse_args()
    rpc = ["--grpc-port", "0"] if {"grpc", "stream"} & {*options.what} else []
    with served(*rpc) as server:
        report = uvloop.run(run(server, options))
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
