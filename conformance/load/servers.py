"""Servers under measurement: started on a port of the system's choice, their metrics, CPU time,
memory, log and end.

A server's output goes to a file. Afterwards it is checked for unexpected errors.
"""

import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import psutil

from conformance import processes

HOST = "127.0.0.1"
START_SECONDS, END_SECONDS, PATIENCE_SECONDS = 180.0, 660.0, 120.0
UNFORESEEN = re.compile(
    r"Traceback|CRITICAL|unforeseen|never retrieved|never awaited|Exception in callback",
    re.IGNORECASE,
)
SAMPLE = re.compile(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
LEVELS = ("te_queue_size", "hybridtei_queue_tokens", "hybridtei_running_batches")
ENDED = ("te_request_success", "te_request_failure")


class Settled(NamedTuple):
    """`seconds` until nothing waited and nothing ran, None if that did not come about; and the
    metrics then."""

    seconds: float | None
    values: Mapping[str, float]


class Server:
    """A process that listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log
        self.watched = psutil.Process(process.pid)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def unforeseen(self) -> list[str]:
        """Lines of its log that no defined answer leaves."""
        return [line for line in self.log().splitlines() if UNFORESEEN.search(line)]

    def everyone(self) -> list[psutil.Process]:
        return [self.watched, *self.watched.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """User and system time of all its processes."""
        return sum(sum(one.cpu_times()[:2]) for one in self.everyone())

    def rss_mb(self) -> float:
        return sum(one.memory_info().rss for one in self.everyone()) / 1e6

    def metrics(self) -> dict[str, float]:
        """Value by name, labels included."""
        with urlopen(f"http://{HOST}:{self.port}/metrics", timeout=PATIENCE_SECONDS) as answer:
            return {name: float(value) for name, value in SAMPLE.findall(answer.read().decode())}

    def settled(self) -> Settled:
        """Wait until every gauge is at zero and every request that was begun has ended."""
        began = time.perf_counter()
        while True:
            values, passed = self.metrics(), time.perf_counter() - began
            idle = inside(values) == 0 and not any(total(values, name) for name in LEVELS)
            if idle or passed > PATIENCE_SECONDS:
                return Settled(passed if idle else None, values)
            time.sleep(0.01)

    def end(self) -> int | None:
        """SIGTERM, unless it has ended; its status, None if it had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


@contextmanager
def started(command: str | Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that accepts connections; `{port}` in its command is a free one. Exits the program
    if it does not start."""
    port = processes.free_port()
    words = [
        word.replace("{port}", str(port))
        for word in (shlex.split(command) if isinstance(command, str) else command)
    ]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        server, deadline = Server(process, port, Path(log.name)), time.monotonic() + START_SECONDS
        try:
            while socket.socket().connect_ex((HOST, port)):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"does not start: {shlex.join(words)}\n{server.log()[-2000:]}")
                time.sleep(0.05)
            yield server
        finally:
            server.end()


def served(*flags: str) -> list[str]:
    """The command of `hybridtei serve`."""
    return processes.served("{port}", *flags)


def named(entries: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, ... -> by name."""
    return dict(entry.split("=", 1) for entry in entries)


def total(values: Mapping[str, float], name: str) -> float:
    """Over all labels."""
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)


def inside(values: Mapping[str, float]) -> float:
    """Requests that were begun and were neither answered, refused, nor given up."""
    return total(values, "te_request_count") - sum(total(values, name) for name in ENDED)
