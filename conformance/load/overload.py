"""Ten times as many clients as permits: every answer 200 or 429, the accepted in bounded time, memory flat.

    python conformance/load/overload.py [--permits 64] [--times 10] [--seconds 30] [--back-offs 0,100]

Starts `hybridtei serve --max-concurrent-requests PERMITS` with the embedded model. First as many clients as there are permits
show what the server can do; then TIMES as many ask at once, each again as soon as it is answered, or a while after it was
refused. Exits with 1 if an answer is neither 200 nor 429, if nobody is refused, if the 99th percentile of the accepted is
beyond `--most-times` that of the clients without overload (`inf` promises no times), if memory grows between the second quarter
of the overload and its last by more than `--most-growth-mb`, or if afterwards anything is left inside. Texts are of mixed
lengths, and no two clients share one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from http_load import MIXED, Texts
from promises import Report, milliseconds
from quiet import idle, inside, plain, settled
from raw_http import Address, connect, request
from served import Served, served

SAMPLE_SECONDS = 0.25
TEXTS_OF_A_CLIENT = 64


@dataclass
class Overload:
    """All clients' results. `accepted` and `refused`: seconds of each answer; `inside`: milliseconds in its headers."""

    statuses: Counter[int] = field(default_factory=Counter)
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    inside_ms: list[int] = field(default_factory=list)
    lost: int = 0
    memory_mb: list[float] = field(default_factory=list)

    def growth_mb(self) -> float:
        """Of the last quarter over the second one."""
        quarter = len(self.memory_mb) // 4
        if quarter == 0:
            return 0.0
        return statistics.median(self.memory_mb[-quarter:]) - statistics.median(self.memory_mb[quarter : 2 * quarter])


async def client(address: Address, requests: Sequence[bytes], until: float, back_off: float, seen: Overload) -> None:
    """One connection, a request at a time."""
    connection = await connect(address)
    turn = random.randrange(len(requests))
    while time.perf_counter() < until:
        turn += 1
        try:
            answer = await connection.ask(requests[turn % len(requests)])
        except (OSError, asyncio.IncompleteReadError):
            seen.lost += 1
            connection = await connect(address)
            continue
        seen.statuses[answer.status] += 1
        if answer.status == 200:
            seen.accepted.append(answer.seconds)
            seen.inside_ms.append(int(answer.headers["x-total-time"]))
        else:
            seen.refused.append(answer.seconds)
            await asyncio.sleep(back_off)
    connection.drop()


async def crowd(server: Served, address: Address, texts: Texts, clients: int, *, seconds: float, back_off: float) -> Overload:
    """So many at once, for a while."""
    seen = Overload()
    prepared = [
        [request(address, "/embed", {"inputs": texts.draw(MIXED)[0]}) for _ in range(TEXTS_OF_A_CLIENT)] for _ in range(clients)
    ]

    async def watch() -> None:
        while True:
            seen.memory_mb.append(server.held().rss_mb)
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.ensure_future(watch())
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client(address, requests, until, back_off, seen) for requests in prepared))
    watching.cancel()
    return seen


async def run(server: Served, options: argparse.Namespace) -> Report:
    report, texts = Report(), Texts()
    address = Address(server.host, server.port)
    usual = await idle(address, texts, 20)
    await crowd(server, address, texts, options.permits, seconds=min(2.0, options.seconds), back_off=0)
    alone = await crowd(server, address, texts, options.permits, seconds=options.seconds / 2, back_off=0)
    report.add(
        f"{options.permits} clients for {options.permits} permits",
        f"{sum(alone.statuses.values())} answers",
        f"{statuses_of(alone)}; {len(alone.accepted) / options.seconds * 2:.0f}/s, {times_of(alone)}",
        set(alone.statuses) == {200} and not alone.lost,
    )
    for back_off in options.back_offs:
        number = options.permits * options.times
        seen = await crowd(server, address, texts, number, seconds=options.seconds, back_off=back_off / 1000)
        tell(report, f"{number} clients for {options.permits} permits, again after {back_off} ms", seen, alone, options)
        quiet = await settled(address)
        answers = [await plain(address, texts) for _ in range(20)]
        took = [answer.seconds for answer in answers]
        report.add(
            "… and afterwards",
            f"{len(answers)} plain requests",
            f"{milliseconds(took):.1f} ms, before {milliseconds(usual):.1f} ms; {inside(quiet.values):.0f} left inside, "
            f"{len(server.unforeseen())} unforeseen lines in the log",
            quiet.seconds is not None and {answer.status for answer in answers} == {200} and not server.unforeseen(),
        )
    return report


def tell(report: Report, name: str, seen: Overload, alone: Overload, options: argparse.Namespace) -> None:
    """A row of one overload."""
    ratio = milliseconds(seen.accepted, 0.99) / milliseconds(alone.accepted, 0.99)
    growth = seen.growth_mb()
    share = len(seen.accepted) / options.seconds / (len(alone.accepted) / options.seconds * 2)
    report.add(
        name,
        f"{sum(seen.statuses.values())} answers",
        f"{statuses_of(seen)}, {seen.lost} without an answer; {len(seen.accepted) / options.seconds:.0f}/s accepted "
        f"({share:.0%} of the rate without overload), {times_of(seen)} ({ratio:.1f} times in p99); refused in "
        f"{milliseconds(seen.refused):.0f} ms (p99 {milliseconds(seen.refused, 0.99):.0f}); memory {seen.memory_mb[0]:.0f} → "
        f"{seen.memory_mb[-1]:.0f} MB, {growth:+.1f} MB from the second quarter to the last",
        set(seen.statuses) == {200, 429} and not seen.lost and ratio <= options.most_times and growth <= options.most_growth_mb,
        **{f"{name} p99 ratio": round(ratio, 2), f"{name} growth MB": round(growth, 2)},
    )


def statuses_of(seen: Overload) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(seen.statuses.items()))


def times_of(seen: Overload) -> str:
    inside_p99 = milliseconds([ms / 1000 for ms in seen.inside_ms], 0.99)
    return (
        f"p50 {milliseconds(seen.accepted):.0f} ms, p99 {milliseconds(seen.accepted, 0.99):.0f} ms "
        f"(inside the server {inside_p99:.0f} ms)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--permits", type=int, default=64)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--back-offs", type=lambda given: [int(one) for one in given.split(",")], default=[0, 100], metavar="MS"
    )
    parser.add_argument("--most-times", type=float, default=4.0)
    parser.add_argument("--most-growth-mb", type=float, default=20.0)
    options = parser.parse_args()
    with served("--max-concurrent-requests", str(options.permits)) as server:
        report = uvloop.run(run(server, options))
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
