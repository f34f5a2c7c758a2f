"""A long run of everything at once, with memory, handles, threads and latency plotted.

    python conformance/load/soak.py --out FOLDER [--minutes 30] [--clients 6] [--droppers 3] [--slow 10] [--load-every 15]

Starts `hybridtei serve --models` with the embedded model and a key. Clients of every route, with now and then a request that
has to be refused, ask one thing after the other; some drop in the middle; some drip a byte a second; a second copy of the
model is loaded under a new name, asked, and unloaded, over and over, with a load between that fails. Exits with 1 if a good
request is not answered with 200 or a bad one not with 4xx, if memory (its floor, in the last quarter against the second) grew
by more than `--most-growth-mb`, handles or threads by more than `--most-growth`, if anything is left inside, or if SIGTERM does
not end it with 0. Writes soak.csv, and soak.png where matplotlib is installed; and the server's log, if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from http_load import Texts
from promises import Report
from quiet import counters, departed, inside, settled
from raw_http import Address
from served import Served, served
from slow import dripping
from soak_traffic import Menu, Visits, dropper, landlord, patron, timed
from soak_watch import Sample, trend, watch, write

API_KEY = "soak"
MODELS = '[[model]]\nmodel_id = "minilm-hybrid"\nalias = "house"\n'
REFUSALS = range(400, 500)
DROPPED = 'te_request_failure{err="dropped"}'
SAMPLES = 240  # of a run; at most one a second


async def soak(server: Served, address: Address, options: argparse.Namespace) -> tuple[Visits, list[Sample]]:
    """All visitors, until the time is up."""
    visits, samples = Visits(), list[Sample]()
    seconds = options.minutes * 60
    until = time.monotonic() + seconds
    watching = asyncio.ensure_future(watch(server, address, visits, samples, max(seconds / SAMPLES, 1.0)))
    async with dripping(address, options.slow):
        await asyncio.gather(
            timed(address, Texts(1), until, visits),
            landlord(address, Menu(2), until, options.load_every, visits),
            *(patron(address, Menu(100 + i), until, visits) for i in range(options.clients)),
            *(dropper(address, Menu(200 + i), until, visits) for i in range(options.droppers)),
        )
    watching.cancel()
    return visits, samples


def tell(report: Report, visits: Visits, samples: list[Sample], options: argparse.Namespace) -> None:
    """Rows of what was seen."""
    for kind, statuses in sorted(visits.statuses.items()):
        wanted = REFUSALS if kind in ("bad", "load of nothing") else range(200, 201)
        told = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
        report.add(f"requests: {kind}", sum(statuses.values()), told, all(status in wanted for status in statuses))
    lost = ", ".join(visits.lost) or "none"
    report.add("clients that dropped", visits.dropped, f"connections lost by others: {lost}", not visits.lost)
    report.add("models loaded and unloaded", visits.loaded, "each asked in between", None)
    bounds = {"rss_mb": options.most_growth_mb, "handles": options.most_growth, "threads": options.most_growth}
    for name, bound in bounds.items():
        seen = trend(samples, name)
        report.add(
            f"{name} over {options.minutes:g} minutes",
            f"{len(samples)} samples",
            f"floor {seen.early:.0f} → {seen.late:.0f}, {seen.an_hour:+.1f} an hour, at most "
            f"{max(getattr(sample, name) for sample in samples):.0f}",
            seen.late - seen.early <= bound,
            **{f"{name} growth": round(seen.late - seen.early, 2)},
        )
    for name in ("p50_ms", "p99_ms"):
        seen = trend(samples, name)
        report.add(f"{name} of a plain request", f"{len(visits.plain)}", f"floor {seen.early:.0f} → {seen.late:.0f}", None)


async def run(server: Served, options: argparse.Namespace) -> Report:
    report, address = Report(), Address(server.host, server.port, API_KEY)
    visits, samples = await soak(server, address, options)
    tell(report, visits, samples, options)
    quiet = await settled(address)
    values = await counters(address)
    report.add(
        "what is left inside",
        1,
        f"{inside(values):.0f} requests; {departed(values):.0f} clients left before work began, "
        f"{values.get(DROPPED, 0):.0f} in the middle of it",
        quiet.seconds is not None,
    )
    server.terminate()
    status = await asyncio.to_thread(server.wait)
    unforeseen = server.unforeseen()
    report.add(
        "SIGTERM; lines in the log that no answer leaves",
        1,
        f"exit {status}; {unforeseen[:3] or 'none'}",
        not status and not unforeseen,
    )
    report.figures["written"] = [str(path) for path in write(samples, options.out)]
    if report.broken:
        (options.out / "server.log").write_text(server.log())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--droppers", type=int, default=3)
    parser.add_argument("--slow", type=int, default=10)
    parser.add_argument("--load-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--most-growth-mb", type=float, default=30.0)
    parser.add_argument("--most-growth", type=float, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models.toml"
        models.write_text(MODELS)
        with served("--models", str(models), api_key=API_KEY) as server:
            report = uvloop.run(run(server, options))
    sys.exit(report.finish())


if __name__ == "__main__":
    main()
