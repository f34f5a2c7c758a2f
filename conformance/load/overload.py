"""Ten times as many clients as permits, which ask again at once: what is still accepted, and how soon everybody is answered.

    python conformance/load/overload.py [--model-id MODEL]... [--permits 64] [--times 10] [--seconds 8] [--rounds 3]

For each model `hybridtei serve --max-concurrent-requests PERMITS` is started, the embedded model without `--model-id`. In each
round 32 connections first show what the server can do; then TIMES as many connections as permits ask again as soon as they are
answered, and beside them PATIENT clients, on connections of their own, wait a second after a 429. All clients are one process
that uses epoll alone (`crowd.py`). Medians of the rounds.

Exits with 1 if an answer is neither 200 nor 429, a request has none, nobody is refused, memory grows over the rounds by more
than `--max-growth-mb`, something is left inside afterwards; and, unless `--any-times`, if less is accepted than MIN_SHARE of
what 32 connections get, if the 99th percentile of the accepted is above MAX_ACCEPTED_SECONDS or any refusal above
MAX_REFUSED_SECONDS, by the client's clock, or if the patient succeed less often than MIN_PATIENT.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from crowd import Group, Seen, crowd
from lone import text
from promises import Report, milliseconds
from quiet import inside, settled
from raw_http import Address, request
from served import Served, served

ALONE = 32  # connections whose rate is what a server can do
BODIES = 512
WARM_SECONDS = 1.0
PAUSE_SECONDS = 1.0  # of patient clients
MIN_SHARE, MAX_ACCEPTED_SECONDS, MAX_REFUSED_SECONDS, MIN_PATIENT = 0.6, 1.5, 1.0, 0.9


@dataclass(frozen=True)
class Round:
    """Rates are accepted requests per second."""

    alone: Seen
    storm: Seen
    patient: Seen
    alone_rate: float
    storm_rate: float
    rss_mb: float

    @property
    def share(self) -> float:
        return self.storm_rate / self.alone_rate

    @property
    def accepted_p99(self) -> float:
        """Seconds."""
        return milliseconds(self.storm.accepted + self.patient.accepted, 0.99) / 1000

    @property
    def longest_refusal(self) -> float:
        """Seconds."""
        return max([*self.storm.refused, *self.patient.refused], default=0.0)

    @property
    def patient_share(self) -> float:
        answers = sum(self.patient.statuses.values())
        return self.patient.statuses[200] / answers if answers else 1.0


def one_round(server: Served, bodies: list[bytes], options: argparse.Namespace) -> Round:
    """32 connections for a while, then the storm."""
    port, seconds = server.port, options.seconds
    crowd(port, [Group(ALONE, bodies)], WARM_SECONDS)
    (alone,) = crowd(port, [Group(min(ALONE, options.permits), bodies)], seconds / 2)
    groups = [Group(options.permits * options.times, bodies), Group(options.patient, bodies, PAUSE_SECONDS)]
    storm, patient = crowd(port, groups, seconds)
    accepted = storm.accepted_in_time + patient.accepted_in_time
    rates = alone.accepted_in_time / seconds * 2, accepted / seconds
    return Round(alone, storm, patient, *rates, server.held().rss_mb)


def measure(report: Report, name: str, server: Served, options: argparse.Namespace) -> None:
    """A row of one model."""
    draw, address = random.Random(0), Address(server.host, server.port)
    bodies = [request(address, "/embed", {"inputs": text(options.words, draw)}) for _ in range(BODIES)]
    rounds = [one_round(server, bodies, options) for _ in range(options.rounds)]
    quiet = asyncio.run(settled(address))
    share, accepted, refused, patient, alone_rate, storm_rate = (
        statistics.median(getattr(one, field) for one in rounds)
        for field in ("share", "accepted_p99", "longest_refusal", "patient_share", "alone_rate", "storm_rate")
    )
    refused = max(one.longest_refusal for one in rounds)
    statuses = sum((one.storm.statuses + one.patient.statuses for one in rounds), Counter[int]())
    missing = sum(seen.lost + seen.unanswered for one in rounds for seen in (one.alone, one.storm, one.patient))
    growth = rounds[-1].rss_mb - rounds[0].rss_mb
    refusals = sum(len(one.storm.refused) + len(one.patient.refused) for one in rounds) / options.seconds / len(rounds)
    times = (share >= MIN_SHARE, accepted <= MAX_ACCEPTED_SECONDS, refused <= MAX_REFUSED_SECONDS, patient >= MIN_PATIENT)
    report.add(
        f"{name}: {options.permits * options.times} + {options.patient} connections for {options.permits} permits",
        f"{len(rounds)} rounds of {options.seconds:g} s, {sum(statuses.values())} answers",
        f"{storm_rate:.0f}/s accepted of {alone_rate:.0f}/s ({share:.0%}; least {min(one.share for one in rounds):.0%}), p99 "
        f"{accepted:.2f} s; {refusals:.0f}/s refused, the last after {refused:.2f} s; the patient succeed {patient:.0%}; "
        f"{', '.join(f'{count} × {status}' for status, count in sorted(statuses.items()))}, {missing} without an answer; "
        f"memory {growth:+.1f} MB; {inside(quiet.values):.0f} left inside, {len(server.unforeseen())} unforeseen lines of log",
        set(statuses) == {200, 429}
        and not missing
        and growth <= options.max_growth_mb
        and quiet.seconds is not None
        and not server.unforeseen()
        and (options.any_times or all(times)),
        **{name: {"share": round(share, 3), "p99 s": round(accepted, 3), "longest refusal s": round(refused, 3)}},
        **{f"{name} patient": round(patient, 3)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", action="append", metavar="MODEL", help="repeatable")
    parser.add_argument("--permits", type=int, default=64)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--patient", type=int, default=20)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-growth-mb", type=float, default=20.0)
    parser.add_argument("--any-times", action="store_true")
    parser.add_argument("--flags", default="", help="more flags of the server")
    options = parser.parse_args()
    report = Report()
    for model in options.model_id or [None]:
        chosen = [] if model is None else ["--model-id", model]
        with served(*chosen, "--max-concurrent-requests", str(options.permits), *options.flags.split()) as server:
            measure(report, Path(model or "embedded").name, server, options)
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
