"""Results of load tests against promises: a table, and a line of JSON for scripts."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("hybridtei", "onnxruntime", "litestar", "uvicorn", "uvloop", "numpy")


@dataclass(frozen=True)
class Row:
    """`kept`: None where nothing was promised, and the figure is for information."""

    tried: str
    times: str
    result: str
    kept: bool | None = None


@dataclass
class Report:
    """Rows as they come; `figures` go into the line of JSON."""

    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, tried: str, times: object, result: str, kept: bool | None = None, **figures: Any) -> None:
        """A row; told at once on stderr, since a run may take long."""
        row = Row(tried, str(times), result, kept)
        self.rows.append(row)
        self.figures |= figures
        print(_line(row), file=sys.stderr, flush=True)

    @property
    def broken(self) -> list[Row]:
        return [row for row in self.rows if row.kept is False]

    def finish(self) -> int:
        """Print everything; -> the exit status: 1 if a promise was broken."""
        print(machine())
        print(f"load average {self.load_at_start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end\n")
        print("| tried | how often | result | |\n| --- | --- | --- | --- |")
        for row in self.rows:
            print(_line(row))
        command = " ".join(["python", "conformance/load/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        print(f"\nagain: {command}")
        told = {"command": command, "broken": [row.tried for row in self.broken], **self.figures}
        print(json.dumps({**told, "rows": [asdict(row) for row in self.rows]}))
        return 1 if self.broken else 0


def _line(row: Row) -> str:
    return f"| {row.tried} | {row.times} | {row.result} | {VERDICTS[row.kept]} |"


VERDICTS = {True: "kept", False: "BROKEN", None: ""}


def machine() -> str:
    """Hardware and versions, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def milliseconds(seconds: Sequence[float], share: float = 0.5) -> float:
    """The value below which such a share lies; not a number where there is none."""
    if not seconds:
        return float("nan")
    if share == 0.5:
        return statistics.median(seconds) * 1000
    return sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)] * 1000
