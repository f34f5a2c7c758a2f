"""Promises under faulty clients, and under too many; exit status 1 if one is broken.

    python -m conformance.load storms [--clients 1000] [--rounds 5] [--in-flight 200] python -m
    conformance.load overload [--model-id MODEL]... [--permits 64] [--times 10] [--seconds 8]
    [--rounds 3]

`storms`: clients disconnect or truncate bodies. No request is left inside (queue gauges at zero;
each request that was begun is counted as answered, refused or dropped), a plain request then takes
no longer than `--most-times` its idle time (inf promises no times), and SIGTERM lets every accepted
request end with an exit status of 0.

`overload`: 32 connections first show what the server can do; then TIMES as many connections as
permits ask again as soon as they are answered. Every answer is 200 or 429, some are 429, memory
grows over the rounds by no more than `--max-growth-mb`, no request is left inside; and, unless
`--any-times`, the medians are within the bounds below.
"""

import argparse
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from conformance.load.crowd import Client, Group, Seen, crowd, request
from conformance.load.report import Report, medians, milliseconds
from conformance.load.servers import HOST, PATIENCE_SECONDS, Server, inside, served, started, total
from conformance.load.traffic import MIXED, PASSAGE, QUERY, Texts, text

MORE = {
    "type": str.split,
    "default": [],
    "help": "flags of the server, such as '--max-connections 100'",
}
MODELS, ANY_TIMES = (
    {"action": "append", "metavar": "MODEL", "help": "repeatable"},
    {"action": "store_true"},
)
COUNTS = {"--permits": 64, "--times": 10, "--words": 60, "--seconds": 8.0, "--rounds": 3}
FLAGS = {
    "storms": {
        "--clients": 1000,
        "--rounds": 5,
        "--in-flight": 200,
        "--most-times": 2.0,
        "--flags": MORE,
    },
    "overload": {"--model-id": MODELS, **COUNTS, "--max-growth-mb": 20.0, "--any-times": ANY_TIMES},
}
# How long a client of a storm stays
HOLD_SECONDS = 0.010
# Plain requests after each storm, texts of a large request
AFTER, BATCH = 20, 32
# SO_LINGER: a close that sends RST
RESET = struct.pack("ii", 1, 0)
ALONE, BODIES, WARM_SECONDS = 32, 512, 1.0
# Of what 32 connections get
MIN_SHARE = 0.45
# The 99th percentile; the last, by the client's clock
MAX_ACCEPTED_SECONDS, MAX_REFUSED_SECONDS = (1.2, 0.8)


def plain(server: Server, texts: Texts) -> float:
    """Seconds of a request with one new short text, on a new connection."""
    began = time.perf_counter()
    client = Client(server.port, [request("/embed", {"inputs": texts.draw(QUERY)[0]})])
    client.ask()
    status = client.answer()
    client.socket.close()
    if status != 200:
        sys.exit(f"a plain request is answered with {status}")
    return time.perf_counter() - began


def drop(server: Server, requests: Sequence[bytes]) -> None:
    """Concurrent clients with one request each that disconnect after a moment, every second one by
    a reset."""
    with ExitStack() as stack:
        for place, data in enumerate(requests):
            with suppress(OSError):
                client = stack.enter_context(socket.create_connection((HOST, server.port)))
                client.setblocking(False)
                client.send(data)
                if place % 2:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        time.sleep(HOLD_SECONDS)


def weather(
    report: Report,
    name: str,
    requests: Sequence[bytes],
    server: Server,
    options: argparse.Namespace,
) -> None:
    """Run a storm several times. Two rows: the remaining work, and the next requests."""
    texts, usual, first, later, quiet = (
        Texts(1),
        list[float](),
        list[float](),
        list[float](),
        server.settled(),
    )
    before = quiet.values
    for _ in range(options.rounds):
        usual += [plain(server, texts) for _ in range(AFTER)]
        drop(server, requests)
        first.append(plain(server, texts))
        quiet = server.settled()
        later += [plain(server, texts) for _ in range(AFTER)]
    values = quiet.values
    begun = total(values, "te_request_count") - total(before, "te_request_count")
    kinds = [f'te_request_failure{{err="{kind}"}}' for kind in ("dropped", "overloaded")]
    dropped, refused = (values.get(kind, 0) - before.get(kind, 0) for kind in kinds)
    result = (
        f"{begun:.0f} begun, {dropped:.0f} dropped, {refused:.0f} refused with 429, "
        f"{inside(values):.0f} unaccounted"
    )
    report.add(
        f"{name}: what is left",
        f"{len(first)} rounds",
        result,
        quiet.seconds is not None and inside(values) == 0,
    )
    times = milliseconds(later) / milliseconds(usual)
    result = (
        f"idle {milliseconds(usual):.1f} ms, the first after {milliseconds(first):.1f} ms, then "
        f"{times:.2f} times of idle"
    )
    report.add(
        f"{name}: the next requests", len(first) + len(later), result, times <= options.most_times
    )


def stop(report: Report, server: Server, requests: Sequence[bytes]) -> None:
    """SIGTERM once all requests are inside the server."""
    before, statuses = total(server.metrics(), "te_request_count"), list[int]()
    clients = [Client(server.port, [data]) for data in requests]
    for client in clients:
        client.ask()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (
        total(server.metrics(), "te_request_count") < before + len(requests)
        and time.monotonic() < deadline
    ):
        pass
    server.process.terminate()
    for client in clients:
        with suppress(OSError):
            statuses.append(client.answer())
    status, good = server.end(), statuses.count(200)
    result = (
        f"{good} answered with 200, {len(statuses) - good} otherwise, "
        f"{len(requests) - len(statuses)} not at all"
    )
    kept = good == len(requests) and status == 0
    report.add(
        f"SIGTERM with {len(requests)} requests in flight", 1, f"{result}; exit {status}", kept
    )


def storms(options: argparse.Namespace) -> int:
    report, texts, number = Report(), Texts(), options.clients
    queries = [request("/embed", {"inputs": texts.draw(QUERY)[0]}) for _ in range(number)]
    batches = [
        request("/embed_hybrid", {"inputs": [texts.draw(MIXED)[0] for _ in range(BATCH)]})
        for _ in range(number)
    ]
    sent = {
        "a query": queries,
        f"{BATCH} texts": batches,
        "half a body": [data[: len(data) // 2] for data in batches],
    }
    with started(served("--drain-seconds", "600", *options.flags)) as server:
        for _ in range(AFTER):
            plain(server, texts)
        for what, requests in sent.items():
            weather(
                report,
                f"{number} clients, {what} each, gone after 10 ms",
                requests,
                server,
                options,
            )
        stop(
            report,
            server,
            [
                request("/embed", {"inputs": texts.draw(PASSAGE)[0]})
                for _ in range(options.in_flight)
            ],
        )
        unforeseen = server.unforeseen()
        report.add(
            "lines in the log that no answer leaves",
            1,
            "; ".join(unforeseen[:3]) or "none",
            not unforeseen,
        )
    return report.finish()


def one_round(
    server: Server, requests: list[bytes], options: argparse.Namespace
) -> tuple[dict[str, float], Seen]:
    """(figures, what all clients but the 32 saw)."""
    crowd(server.port, [Group(ALONE, requests)], WARM_SECONDS)
    (alone,) = crowd(
        server.port, [Group(min(ALONE, options.permits), requests)], options.seconds / 2
    )
    (storm,) = crowd(
        server.port, [Group(options.permits * options.times, requests)], options.seconds
    )
    able, accepted = (
        alone.in_time.total() / options.seconds * 2,
        storm.in_time.total() / options.seconds,
    )
    figures = {
        "able": able,
        "accepted": accepted,
        "share": accepted / able,
        "p99": milliseconds(storm.accepted, 0.99) / 1000,
        "last": max(storm.refused, default=0.0),
        "refused": len(storm.refused) / options.seconds,
        "missing": alone.missing + storm.missing,
        "memory": server.rss_mb(),
    }
    return figures, storm


def measure(report: Report, name: str, server: Server, options: argparse.Namespace) -> None:
    """A row of one model."""
    draw = random.Random(0)
    requests = [request("/embed", {"inputs": text(options.words, draw)}) for _ in range(BODIES)]
    rounds, seen = zip(
        *(one_round(server, requests, options) for _ in range(options.rounds)), strict=True
    )
    found, quiet, unforeseen = medians(rounds), server.settled(), server.unforeseen()
    last, missing = max(one["last"] for one in rounds), sum(one["missing"] for one in rounds)
    statuses = sum((one.statuses for one in seen), Counter[int]())
    growth = rounds[-1]["memory"] - rounds[0]["memory"]
    in_time = found["p99"] <= MAX_ACCEPTED_SECONDS and last <= MAX_REFUSED_SECONDS
    leaves_nothing = (
        not missing
        and growth <= options.max_growth_mb
        and quiet.seconds is not None
        and not unforeseen
    )
    report.add(
        f"{name}: {options.permits * options.times} connections for {options.permits} permits",
        f"{len(rounds)} rounds of {options.seconds:g} s, {statuses.total()} answers",
        f"{found['accepted']:.0f}/s accepted of {found['able']:.0f}/s ({found['share']:.0%}), p99 "
        f"{found['p99']:.2f} s; {found['refused']:.0f}/s refused, the last after {last:.2f} s; "
        f"{', '.join(f'{count} × {status}' for status, count in sorted(statuses.items()))}, "
        f"{missing} without an answer; memory {growth:+.1f} MB; {inside(quiet.values):.0f} left "
        f"inside, {len(unforeseen)} unforeseen lines of log",
        set(statuses) == {200, 429}
        and leaves_nothing
        and (options.any_times or (in_time and found["share"] >= MIN_SHARE)),
    )


def overload(options: argparse.Namespace) -> int:
    report = Report()
    for model in options.model_id or [None]:
        chosen = [] if model is None else ["--model-id", model]
        with started(served(*chosen, "--max-concurrent-requests", str(options.permits))) as server:
            measure(report, Path(model or "embedded").name, server, options)
    return report.finish()
