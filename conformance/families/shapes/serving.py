"""A server of one checkpoint in a process that cannot import torch: how soon it answers, and what
memory it holds."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.processes import DIRECT, free_port, served, started

ROOT = Path(__file__).parents[3]
ABSENT = Path(__file__).with_name("without_torch")
HANG_SECONDS = 900


@dataclass
class Server:
    """A running server. `ready_seconds`: from the command to the first answer of /health."""

    process: subprocess.Popen[bytes]
    url: str
    ready_seconds: float

    def post(self, path: str, body: Any) -> Any:
        """The answer. Raises URLError."""
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with DIRECT.open(request, timeout=HANG_SECONDS) as answer:
            return json.load(answer)

    def resting_bytes(self, kind: str) -> int:
        """`Pss`: the proportional set size, in which pages that several processes share count once.
        `Anonymous`: of no file."""
        return (
            sum(_kilobytes(Path(f"/proc/{each}/smaps_rollup"), kind) for each in self._processes())
            * 1024
        )

    def peak_bytes(self) -> int:
        """The most that each process ever held in memory, files that it mapped included."""
        return (
            sum(_kilobytes(Path(f"/proc/{each}/status"), "VmHWM") for each in self._processes())
            * 1024
        )

    def _processes(self) -> list[int]:
        return [self.process.pid, *descendants(self.process.pid)]


@contextmanager
def serving(folder: Path, cache: Path, flags: Sequence[str], log: Path) -> Iterator[Server]:
    """`hybridtei serve` of a checkpoint. Raises RuntimeError, with the end of its log, if it does
    not come up."""
    port = free_port()
    command = served(port, "--model-id", str(folder), *flags)
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "LANG", "HYBRIDTEI_CORES")
        },
        "HOME": str(cache),
        "HYBRIDTEI_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ABSENT), str(ROOT)]),
    }
    began = time.perf_counter()
    with started(command, port, log, HANG_SECONDS, env=environment, cwd=cache) as process:
        yield Server(process, f"http://127.0.0.1:{port}", time.perf_counter() - began)


def descendants(process_id: int) -> list[int]:
    """The descendants of a process."""
    children = []
    for file in Path(f"/proc/{process_id}/task").glob("*/children"):
        children += [int(child) for child in file.read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]


def _kilobytes(file: Path, key: str) -> int:
    return next(
        int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{key}:")
    )
