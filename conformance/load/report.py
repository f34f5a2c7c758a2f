"""What scenarios print: the machine, rounds of sides that take turns, tables, and promises with a
line of JSON for scripts."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

PACKAGES = (
    "hybridtei",
    "onnxruntime",
    "openvino",
    "torch",
    "litestar",
    "uvicorn",
    "uvloop",
    "httptools",
    "numpy",
)
VERDICTS = {True: "kept", False: "BROKEN", None: ""}

Side = TypeVar("Side")


def machine() -> str:
    """Hardware and versions, in one line."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return (
        f"{processor()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, "
        f"{', '.join(found)}"
    )


def processor() -> str:
    """The processor's model as the kernel spells it, or the architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def paired(rounds: int, sides: Mapping[str, Callable[[], Side]]) -> dict[str, list[Side]]:
    """Measure all sides once a round, in turn, so that other programs slow each of them."""
    found: dict[str, list[Side]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure())
    return found


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios; not a number if an other is zero."""
    return statistics.median(
        one / other if other else float("nan") for one, other in zip(ours, others, strict=True)
    )


def milliseconds(seconds: Sequence[float], share: float = 0.5) -> float:
    """The quantile `share` of the values; NaN without values."""
    return (
        sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)] * 1000
        if seconds
        else float("nan")
    )


def table(rows: Mapping[str, Mapping[str, float]]) -> None:
    """A row a side, a column a figure; then the same as a line of JSON."""
    names = [*next(iter(rows.values()))]
    width = max(map(len, rows)) + 2
    print(" " * width + "".join(f"{name:>{max(len(name) + 2, 10)}}" for name in names))
    for side, row in rows.items():
        cells = (
            f"{row[name]:{max(len(name) + 2, 10)}.{0 if abs(row[name]) >= 1000 else 2}f}"
            for name in names
        )
        print(f"{side:{width}}{''.join(cells)}")
    print(
        json.dumps(
            {
                side: {name: round(value, 3) for name, value in row.items()}
                for side, row in rows.items()
            }
        ),
        flush=True,
    )


class Report:
    """Promises, and the results of testing them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str | bool | None]] = []

    def add(self, tried: str, times: object, result: str, kept: bool | None = None) -> None:
        """A row, printed immediately, since a run may take long. `kept`: None if nothing was
        promised."""
        self.rows.append({"tried": tried, "times": str(times), "result": result, "kept": kept})
        print(f"| {tried} | {times} | {result} | {VERDICTS[kept]} |", flush=True)

    def finish(self) -> int:
        """Print a line of JSON; -> the exit status: 1 if a promise was broken."""
        broken = [row["tried"] for row in self.rows if row["kept"] is False]
        print(json.dumps({"broken": broken, "rows": self.rows}))
        return 1 if broken else 0
