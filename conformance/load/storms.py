"""Many faulty clients at once: they disconnect, truncate bodies, send a byte a second; and SIGTERM meanwhile.

    python conformance/load/storms.py [--clients 1000] [--rounds 5] [--slow 300] [--in-flight 200] [--grpc]

Starts `hybridtei serve` with the embedded model, and exits with 1 if a promise is broken. Promised is that a storm leaves
no request inside (queue gauges at zero; each request that was begun is counted as answered, refused or dropped), that a plain
request then takes no longer than `--most-times` its idle time, that slow clients cost others no more than that, and that
SIGTERM lets every accepted request end with an exit status of 0. Idle times are taken before each round, so that other
programs slow both sides; `--most-times inf` promises no times.

With `--http-workers`, one process may be free to answer while another still reads what a thousand clients left, and holds the
permits of disconnected clients. Requests are then refused with 429: the server is at capacity. Promised is that this ends
within `--most-recovery` seconds of the storm, and that no request is refused after that.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from http_load import MIXED, PASSAGE, QUERY, Texts
from promises import Report, milliseconds
from quiet import PATIENCE_SECONDS, Settled, counters, departed, idle, inside, plain, settled
from raw_http import Address, Answer, connect, request
from served import Held, Served, served, total
from slow import among_slow_clients, stop_in_flight

HOLD_SECONDS = 0.010  # how long a client of a storm stays
AFTER = 20  # plain requests after each storm
BATCH = 32  # texts in a request of the heavier storms
MESSAGES = 50  # of a stream
HANDLES_ALLOWED = 2
QUIET_LOOKS = 5  # in a row: of several processes, one that is busy does not tell at once what is inside it
OVERLOADED = 429

Storm = Callable[[], Awaitable[object]]


@dataclass
class Seen:
    """What rounds of a storm left, and how plain requests fared: seconds before, the first one after, and the rest.

    Of each round: how many requests were refused at capacity, and for how many seconds after the storm.
    """

    before: Mapping[str, float]
    held_before: Held
    usual: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)
    refused: list[int] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    quiet_after: list[float] = field(default_factory=list)
    left: dict[str, float] | None = None
    after: Mapping[str, float] = field(default_factory=dict)

    def grew(self, name: str, labels: str = "") -> int:
        """A counter, by name or by name and labels."""
        if labels:
            return int(self.after.get(name + labels, 0) - self.before.get(name + labels, 0))
        return int(total(self.after, name) - total(self.before, name))


async def weather(storm: Storm, server: Served, address: Address, texts: Texts, rounds: int) -> Seen:
    """Run a storm several times."""
    seen = Seen(await counters(address), server.held())
    for _ in range(rounds):
        seen.usual += await idle(address, texts, AFTER)
        await storm()
        first = await recovery(address, texts, seen)
        quiet = await still(address)
        later = [await plain(address, texts) for _ in range(AFTER)]
        seen.first.append(first.seconds)
        seen.later += [answer.seconds for answer in later]
        seen.statuses |= {answer.status for answer in later}
        if quiet.seconds is None:
            seen.left = quiet.levels
            break
        seen.quiet_after.append(quiet.seconds)
    seen.after = await counters(address)
    return seen


async def recovery(address: Address, texts: Texts, seen: Seen) -> Answer:
    """Repeat a request until it is not refused; return the first answer as well."""
    began = time.perf_counter()
    answers = [await plain(address, texts)]
    while answers[-1].status == OVERLOADED and time.perf_counter() - began < PATIENCE_SECONDS:
        answers.append(await plain(address, texts))
    seen.statuses |= {answer.status for answer in answers} - {OVERLOADED}
    seen.refused.append(len(answers) - 1)
    seen.recovered.append(time.perf_counter() - began)
    return answers[0]


async def still(address: Address) -> Settled:
    """Wait until the server is idle in several checks in a row."""
    began = time.perf_counter()
    for _ in range(QUIET_LOOKS):
        look = await settled(address)
        if look.seconds is None:
            return look
    return Settled(time.perf_counter() - began, look.values)


def tell(report: Report, name: str, seen: Seen, held: Held, options: argparse.Namespace) -> None:
    """Two rows: what is left, and the next requests."""
    dropped, refused = (seen.grew("te_request_failure", f'{{err="{kind}"}}') for kind in ("dropped", "overloaded"))
    left = int(departed(seen.after) - departed(seen.before))
    wait = f"gauges at zero within {max(seen.quiet_after):.2f} s" if seen.left is None else f"left: {seen.left}"
    report.add(
        f"{name}: what is left",
        f"{len(seen.first)} rounds",
        f"{left} counted as gone before work began, {seen.grew('te_request_count')} begun, of which {dropped} dropped, "
        f"{refused} refused with 429, {inside(seen.after):.0f} unaccounted; {wait}",
        seen.left is None and inside(seen.after) == 0,
    )
    usual, first, later = milliseconds(seen.usual), milliseconds(seen.first), milliseconds(seen.later)
    before = seen.held_before
    late = [seconds for seconds, refused in zip(seen.recovered, seen.refused, strict=True) if refused]
    refusals = f", {sum(seen.refused)} refused, the last of them {max(late):.2f} s after the storm" if late else ""
    report.add(
        f"{name}: the next requests",
        len(seen.first) + len(seen.later),
        f"idle {usual:.1f} ms, the first after {first:.1f} ms ({first / usual:.1f} times), then {later:.1f} ms "
        f"({later / usual:.2f} times){refusals}; handles {before.handles} → {held.handles}, threads {before.threads} → "
        f"{held.threads}",
        seen.statuses == {200}
        and later / usual <= options.most_times
        and max(late, default=0.0) <= (options.most_recovery if math.isfinite(options.most_times) else PATIENCE_SECONDS)
        and held.handles <= before.handles + HANDLES_ALLOWED,
        **{f"{name} ratio": round(later / usual, 2)},
    )


def dropping(address: Address, requests: Sequence[bytes]) -> Storm:
    """Clients with one request each, all at once, which disconnect after a moment, every other one by a reset."""

    async def client(data: bytes, place: int) -> None:
        try:
            connection = await connect(address)
        except OSError:
            return
        connection.send(data)
        await asyncio.sleep(HOLD_SECONDS)
        connection.drop(reset=place % 2 == 1)

    async def storm() -> None:
        await asyncio.gather(*(client(data, place) for place, data in enumerate(requests)))

    return storm


def storms(address: Address, server: Served, texts: Texts, options: argparse.Namespace) -> dict[str, Storm]:
    """By name."""
    number = options.clients

    def texts_of(mix: Any, count: int) -> list[str]:
        return [texts.draw(mix)[0] for _ in range(count)]

    queries = [request(address, "/embed", {"inputs": text}) for text in texts_of(((1.0, QUERY),), number)]
    batches = [request(address, "/embed_hybrid", {"inputs": texts_of(MIXED, BATCH)}) for _ in range(number)]
    found = {
        f"{number} clients, a query each, gone after 10 ms": dropping(address, queries),
        f"{number} clients, {BATCH} texts each, gone after 10 ms": dropping(address, batches),
        f"{number} clients, half a body each, gone after 10 ms": dropping(
            address, [data[: len(data) // 2] for data in batches]
        ),
    }
    if options.grpc:
        from rpc_storm import cancelled_streams

        streams = [texts_of(MIXED, MESSAGES) for _ in range(max(number // 10, 1))]
        found[f"{len(streams)} gRPC streams of {MESSAGES} messages, cancelled after 50 ms"] = lambda: cancelled_streams(
            server.rpc_port, streams, 5 * HOLD_SECONDS
        )
    return found


async def run(server: Served, options: argparse.Namespace) -> Report:
    report, texts = Report(), Texts()
    address = Address(server.host, server.port)
    await idle(address, texts, AFTER)  # warm
    for name, storm in storms(address, server, texts, options).items():
        seen = await weather(storm, server, address, texts, options.rounds)
        tell(report, name, seen, server.held(), options)
    await among_slow_clients(report, address, texts, options.slow, options.most_times)
    in_flight = [request(address, "/embed", {"inputs": texts.draw(((1.0, PASSAGE),))[0]}) for _ in range(options.in_flight)]
    await stop_in_flight(report, server, address, in_flight, options.slow)
    unforeseen = server.unforeseen()
    report.add("lines in the log that no answer leaves", 1, "; ".join(unforeseen[:3]) or "none", not unforeseen)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", type=int, default=300)
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--drain-seconds", default="600", help="as long as this machine may need for what is in flight")
    parser.add_argument("--most-times", type=float, default=2.0)
    parser.add_argument(
        "--most-recovery", type=float, default=1.0, help="seconds after a storm that plain requests may be refused"
    )
    parser.add_argument("--grpc", action="store_true", help="streams that are cancelled, too")
    parser.add_argument("--flags", type=shlex.split, default=[], help="further ones of the server, such as '--http-workers 2'")
    options = parser.parse_args()
    rpc = ["--grpc-port", "0"] if options.grpc else []
    with served("--drain-seconds", options.drain_seconds, *rpc, *options.flags) as server:
        report = uvloop.run(run(server, options))
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
