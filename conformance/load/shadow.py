"""A server that shadows one that hangs, beside two that shadow nothing: whether its clients notice, and what it holds.

    python conformance/load/shadow.py [--model-id MODEL] [--rate 1.0] [--connections 8] [--turns 20] [--seconds 1.5]

The other server takes connections and reads nothing. All servers run at once and one at a time is asked, in turns of random
order, so that whatever else the machine does meets all of them. Each turn's 95th percentile is divided by the one of the plain
server in the same round: of its twin, which is the same command, the ratios are the noise; those of the shadowing server lie
within it where their median lies between the twin's lower and upper tenth.

Exits with 1 if not all answers are 200, a median lies above the noise, more copies wait than may, memory grows by more than
`--max-growth-mb` after the first half, or the server takes longer than END_SECONDS to end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from crowd import Group, crowd
from lone import text
from promises import Report, milliseconds
from quiet import counters
from raw_http import Address, request
from served import Served, served

from hybridtei.server.http.shadow import CONNECTIONS, MAX_HELD_BYTES, MAX_WAITING

PLAIN, TWIN, SHADOWING = NAMES = ("plain", "twin", "shadowing")
BODIES = 512
END_SECONDS = 10.0


def turn(server: Served, options: argparse.Namespace, draw: random.Random) -> float:
    """The 95th percentile of one turn, in milliseconds. Raises RuntimeError where an answer is not 200."""
    address = Address(server.host, server.port)
    bodies = [request(address, "/embed", {"inputs": text(options.words, draw)}) for _ in range(BODIES)]
    (seen,) = crowd(server.port, [Group(options.connections, bodies)], options.seconds)
    if set(seen.statuses) != {200} or seen.lost or seen.unanswered:
        raise RuntimeError(f"{seen.statuses}, {seen.lost} lost, {seen.unanswered} unanswered")
    return milliseconds(seen.accepted, 0.95)


def measure(report: Report, servers: dict[str, Served], options: argparse.Namespace) -> None:
    """Rows of the times, and of what is held."""
    draw = random.Random(0)
    for server in servers.values():
        turn(server, options, draw)  # warm
    ratios: dict[str, list[float]] = {TWIN: [], SHADOWING: []}
    levels = []
    for _ in range(options.turns):
        late = {name: turn(servers[name], options, draw) for name in draw.sample(NAMES, len(NAMES))}
        for name, found in ratios.items():
            found.append(late[name] / late[PLAIN])
        levels.append(servers[SHADOWING].held().rss_mb)
    noise = statistics.quantiles(ratios[TWIN], n=10)
    middle = {name: statistics.median(found) for name, found in ratios.items()}
    report.add(
        "p95 of a live request while the other server hangs, divided by the plain server's",
        f"{options.turns} turns of {options.seconds:g} s, {options.connections} connections",
        f"median {middle[SHADOWING]:.3f}; twin {middle[TWIN]:.3f}, a tenth below {noise[0]:.3f}, a tenth above {noise[-1]:.3f}",
        middle[SHADOWING] <= noise[-1],
        p95_ratio=round(middle[SHADOWING], 3),
        twin=round(middle[TWIN], 3),
    )
    values = asyncio.run(counters(Address(Served.host, servers[SHADOWING].port)))
    held = {name: values.get(f"hybridtei_shadow_{name}", 0.0) for name in ("waiting", "bytes", "sent_total")}
    dropped = values.get('hybridtei_shadow_dropped_total{reason="queue"}', 0.0)
    growth = levels[-1] - levels[len(levels) // 2]
    report.add(
        f"copies at {options.rate:g} of the traffic",
        f"{held['sent_total'] + held['waiting'] + dropped:.0f} copies",
        f"{held['waiting']:.0f} wait, {held['bytes']:.0f} bytes; {held['sent_total']:.0f} sent, {dropped:.0f} dropped; memory "
        f"{growth:+.1f} MB over the second half",
        held["waiting"] <= MAX_WAITING and held["bytes"] <= MAX_HELD_BYTES and dropped > 0 and growth <= options.max_growth_mb,
    )


def end(report: Report, server: Served) -> None:
    """A row of the time to its end, while `CONNECTIONS` calls are under way."""
    began = time.monotonic()
    server.terminate()
    status, took = server.wait(), time.monotonic() - began
    unforeseen = server.unforeseen()
    report.add(
        f"SIGTERM with {CONNECTIONS} calls under way",
        1,
        f"status {status} after {took:.1f} s; {len(unforeseen)} unforeseen lines of log",
        status == 0 and took <= END_SECONDS and not unforeseen,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", metavar="MODEL")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--words", type=int, default=20)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--max-growth-mb", type=float, default=20.0)
    options = parser.parse_args()
    report = Report()
    chosen = [] if options.model_id is None else ["--model-id", options.model_id]
    with ExitStack() as stack:
        hanging = stack.enter_context(socket.create_server((Served.host, 0), backlog=64))
        url = f"http://{Served.host}:{hanging.getsockname()[1]}"
        flags = {PLAIN: [], TWIN: [], SHADOWING: ["--shadow", url, "--shadow-rate", str(options.rate)]}
        servers = {name: stack.enter_context(served(*chosen, *flags[name])) for name in NAMES}
        measure(report, servers, options)
        end(report, servers[SHADOWING])
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
