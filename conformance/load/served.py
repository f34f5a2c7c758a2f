"""The server as its command starts it, for load scripts: address, metrics, memory, handles, log, end.

What it writes goes to a file, which is looked through afterwards: nothing may be there that the program did not foresee.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

START_SECONDS = 180.0
END_SECONDS = 660.0
UNFORESEEN = re.compile(r"Traceback|CRITICAL|unforeseen|never retrieved|never awaited|Exception in callback", re.IGNORECASE)
HTTP, RPC = re.compile(r"Starting HTTP server: [\d.]+:(\d+)"), re.compile(r"Starting gRPC server: [\d.]+:(\d+)")
SAMPLE = re.compile(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Held:
    """A process's resident megabytes, open handles and threads."""

    rss_mb: float
    handles: int
    threads: int


class Served:
    """One running server."""

    host = "127.0.0.1"

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._watched = psutil.Process(process.pid)
        self.port = self.rpc_port = 0

    def wait_ready(self) -> None:
        """Exits the script if it does not start."""
        deadline = time.monotonic() + START_SECONDS
        while "Ready" not in (text := self.log()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server does not start:\n{text[-2000:]}")
            time.sleep(0.05)
        http, rpc = HTTP.search(text), RPC.search(text)
        self.port = int(http[1]) if http else 0
        self.rpc_port = int(rpc[1]) if rpc else 0

    def log(self) -> str:
        """All that it has written."""
        return self._log.read_text(errors="replace")

    def unforeseen(self) -> list[str]:
        """Lines of its log that no defined answer leaves."""
        return [line for line in self.log().splitlines() if UNFORESEEN.search(line)]

    def held(self) -> Held:
        """What it holds now."""
        with self._watched.oneshot():
            memory, threads = self._watched.memory_info().rss / 1e6, self._watched.num_threads()
        return Held(memory, self._watched.num_fds(), threads)

    def terminate(self) -> None:
        """SIGTERM; returns at once."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """Its status; None if it has to be killed."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def served(*flags: str, api_key: str | None = None) -> Iterator[Served]:
    """`hybridtei serve` on free ports, ready to answer. `flags`: beside its address."""
    key = [] if api_key is None else ["--api-key", api_key]
    command = [sys.executable, "-m", "hybridtei", "serve", "--hostname", Served.host, "--port", "0", *key, *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        running = Served(process, log)
        try:
            running.wait_ready()
            yield running
        finally:
            running.kill()


def samples(exposition: str) -> dict[str, float]:
    """Prometheus text -> value by name, labels included."""
    return {name: float(value) for name, value in SAMPLE.findall(exposition)}


def total(values: Mapping[str, float], name: str) -> float:
    """Over all labels."""
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)


def grown(before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str]) -> float:
    """By how much some counters together grew."""
    return sum(total(after, name) - total(before, name) for name in names)
