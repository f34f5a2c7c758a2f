"""A server in a separate process with a probe inside, and the cost of each request."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from conformance.amplify.request import Request
from conformance.fuzz import peer
from conformance.fuzz.peer import Peer
from conformance.fuzz.shot import Outcome, Reply, Shot
from conformance.processes import free_port, started

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 60.0
# After which a client leaves without its answer, and after which many clients do
LEAVE_SECONDS, CROWD_SECONDS = 30.0, 5.0
# What another client asks meanwhile
SMALL = Request("POST", "/embed", {"inputs": "a"})


@dataclass(frozen=True)
class Cost:
    """The cost of a request: memory beyond idle, request and encoded answer; the longest stall; the
    longest wait of another client, and how many of its requests were refused; and its outcome."""

    growth_bytes: int
    stall_seconds: float
    status: str
    answer_bytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    refused: int = 0

    def least(self, other: Cost) -> Cost:
        """Return the smaller cost of two runs of one request."""
        return replace(
            other,
            growth_bytes=min(self.growth_bytes, other.growth_bytes),
            stall_seconds=min(self.stall_seconds, other.stall_seconds),
            wait_seconds=min(self.wait_seconds, other.wait_seconds),
        )


class Lines:
    """A process that answers a word with a line of JSON."""

    def __init__(self, sent: TextIO, read: TextIO, name: str) -> None:
        self._sent, self._read, self._name = sent, read, name

    def tell(self, word: str) -> Any:
        self.send(word)
        return self.answer()

    def send(self, word: str) -> None:
        self._sent.write(f"{word}\n")
        self._sent.flush()

    def answer(self) -> Any:
        """Raises RuntimeError if the process has ended."""
        line = self._read.readline()
        if not line:
            raise RuntimeError(f"the {self._name} ended")
        return json.loads(line)


class Target:
    """One server, its probe, and its other client."""

    host = "127.0.0.1"

    def __init__(
        self, port: int, probe: Lines, neighbour: Lines, rpc_port: int | None = None
    ) -> None:
        self.port = port
        self.rpc_port = rpc_port
        self._probe, self._neighbour = probe, neighbour

    def measure(self, request: Request) -> Cost:
        """Send a request while only the other client's run, and read all of its answers."""
        if request.method == "RPC":
            # Needs grpcio
            from conformance.amplify.rpc import call

            sent, work = call(self, request)
        else:
            pieces = request.pieces()
            sent, work = (
                sum(map(len, pieces)) * request.connections,
                lambda: self._ask(Shot("amplify", pieces, request.copies), request.connections),
            )
        self._probe.tell("begin")
        self._neighbour.send("begin")
        began = time.perf_counter()
        status, answered = work()
        seconds = time.perf_counter() - began
        waited = self._neighbour.tell("end")
        taken = self._probe.tell("end")
        return Cost(
            taken["growth_bytes"] - answered - sent,
            taken["stall_seconds"],
            status,
            answered,
            seconds,
            **waited,
        )

    def ask(self, request: Request) -> Reply | None:
        """Return the answer to a request without measuring it; None if there is none."""
        outcome = asyncio.run(
            Peer(self.host, self.port).ask(Shot("amplify", request.pieces(), request.copies))
        )
        return outcome.replies[0] if outcome.replies else None

    def _ask(self, shot: Shot, connections: int) -> tuple[str, int]:
        """The most frequent outcome, and the bytes of all answers."""

        async def ask() -> Outcome:
            peer = Peer(self.host, self.port)
            try:
                async with asyncio.timeout(LEAVE_SECONDS if connections == 1 else CROWD_SECONDS):
                    return await peer.ask(shot)
            except TimeoutError:
                peer.close()
                return Outcome(broken="left")

        async def everyone() -> list[Outcome]:
            return await asyncio.gather(*(ask() for _ in range(connections)))

        outcomes = asyncio.run(everyone())
        status, _ = Counter(map(status_of, outcomes)).most_common(1)[0]
        return status, sum(len(reply.body) for each in outcomes for reply in each.replies)


def status_of(outcome: Outcome) -> str:
    """What came of a shot: the last status, or why there is none."""
    if outcome.hung:
        return "hung"
    if outcome.replies:
        return str(outcome.replies[-1].status)
    return outcome.broken or "closed"


@contextmanager
def running(
    command: Sequence[str],
    *,
    port: int,
    rpc_port: int | None = None,
    log: Path,
    small: Request = SMALL,
    **variables: str,
) -> Iterator[Target]:
    """A server until the block is left. `command`: with `{probe}` in the place of the descriptor.
    `small`: what the other client asks. Raises RuntimeError."""
    peer.HANG_SECONDS = HANG_SECONDS
    ours, theirs = socket.socketpair()
    filled = [word.format(probe=theirs.fileno()) for word in command]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **variables}
    with (
        ours,
        theirs,
        started(filled, port, log, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]),
    ):
        theirs.close()
        with ours.makefile("rw") as lines, neighbour(port, small) as other:
            yield Target(port, Lines(lines, lines, "server"), other, rpc_port)


@contextmanager
def neighbour(port: int, small: Request) -> Iterator[Lines]:
    """The other client: a process, so that this one's work does not delay it."""
    command = [sys.executable, "-m", "conformance.amplify.neighbour", str(port), small.told()]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = Lines(process.stdin, process.stdout, "other client")
        # It has had an answer
        lines.answer()
        yield lines


@contextmanager
def serving(scratch: Path) -> Iterator[Target]:
    """The server with its default flags, the embedded model and an embedded vector store."""
    port, rpc_port = free_port(), _rpc_port()
    flags = [
        "--hostname",
        Target.host,
        "--port",
        str(port),
        "--qdrant-path",
        str(scratch / "store"),
    ]
    flags += [] if rpc_port is None else ["--grpc-port", str(rpc_port)]
    command = [sys.executable, "-m", "conformance.amplify.launch", "{probe}", *flags]
    with running(
        command,
        port=port,
        rpc_port=rpc_port,
        log=scratch / "log",
        HYBRIDTEI_CACHE=str(scratch / "cache"),
    ) as target:
        yield target


def _rpc_port() -> int | None:
    try:
        # Whether it is there
        import grpc  # noqa: F401
    except ImportError:
        return None
    return free_port()
