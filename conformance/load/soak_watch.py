"""What a server holds and how fast it answers over time: samples, whether they are flat, a CSV, a picture."""

from __future__ import annotations

import asyncio
import csv
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from promises import milliseconds
from quiet import counters
from raw_http import Address
from served import Served, total
from soak_traffic import Visits

WINDOW_SECONDS = 20.0  # of which the latencies are


@dataclass(frozen=True)
class Sample:
    """At one moment."""

    seconds: float
    rss_mb: float
    handles: int
    threads: int
    queue: float
    p50_ms: float
    p99_ms: float


async def watch(server: Served, address: Address, visits: Visits, samples: list[Sample], every: float) -> None:
    """Until cancelled."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(every)
        now, held = time.monotonic(), server.held()
        recent = [seconds for when, seconds in visits.plain if when > now - WINDOW_SECONDS]
        queue = total(await counters(address), "te_queue_size")
        p50, p99 = milliseconds(recent), milliseconds(recent, 0.99)
        samples.append(Sample(now - began, held.rss_mb, held.handles, held.threads, queue, p50, p99))


@dataclass(frozen=True)
class Trend:
    """Of one thing: its floor (tenth percentile) in the second quarter and in the last, and by how much it rises an hour."""

    early: float
    late: float
    an_hour: float


def trend(samples: Sequence[Sample], name: str) -> Trend:
    """The first quarter is warming up. Floors, since models that come and go make peaks."""
    quarter = max(len(samples) // 4, 1)
    values = [float(getattr(sample, name)) for sample in samples]
    times = [sample.seconds for sample in samples]
    slope = statistics.linear_regression(times[quarter:], values[quarter:]).slope if len(values) - quarter > 1 else 0.0
    return Trend(_floor(values[quarter : 2 * quarter] or values), _floor(values[-quarter:]), slope * 3600)


def _floor(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def write(samples: Sequence[Sample], folder: Path) -> list[Path]:
    """`soak.csv`, and `soak.png` if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "soak.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
        writer.writeheader()
        writer.writerows({name: round(value, 2) for name, value in asdict(sample).items()} for sample in samples)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [table]
    figure = Figure(figsize=(9, 9), layout="constrained")
    minutes = [sample.seconds / 60 for sample in samples]
    rows = [("rss_mb",), ("handles",), ("threads",), ("p50_ms", "p99_ms")]
    for axes, names in zip(figure.subplots(len(rows), 1, sharex=True), rows, strict=True):
        for name in names:
            axes.plot(minutes, [getattr(sample, name) for sample in samples], label=name)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left")
        axes.grid(alpha=0.3)
    figure.axes[-1].set_xlabel("minutes")
    picture = folder / "soak.png"
    figure.savefig(picture, dpi=110)
    return [table, picture]
