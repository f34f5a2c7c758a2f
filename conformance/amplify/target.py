"""A server in a separate process with a probe inside, and the cost of each request."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from conformance.amplify.request import Request
from conformance.fuzz import peer
from conformance.fuzz.peer import Peer
from conformance.fuzz.shot import Reply, Shot
from conformance.processes import free_port, started

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 60.0


@dataclass(frozen=True)
class Cost:
    """The cost of a request: memory beyond idle, request and encoded answer; the longest stall; and
    its outcome."""

    growth_bytes: int
    stall_seconds: float
    status: str
    answer_bytes: int = 0
    seconds: float = 0.0

    def least(self, other: Cost) -> Cost:
        """Return the smaller cost of two runs of one request."""
        growth = min(self.growth_bytes, other.growth_bytes)
        return Cost(
            growth,
            min(self.stall_seconds, other.stall_seconds),
            other.status,
            other.answer_bytes,
            other.seconds,
        )


class Target:
    """One server. `lines`: to its probe and back."""

    host = "127.0.0.1"

    def __init__(self, port: int, lines: TextIO, rpc_port: int | None = None) -> None:
        self.port = port
        self.rpc_port = rpc_port
        self._lines = lines

    def measure(self, request: Request) -> Cost:
        """Send a request while no other runs, and read all of its answer."""
        if request.method == "RPC":
            # Needs grpcio
            from conformance.amplify.rpc import call

            sent, work = call(self, request)
        else:
            pieces = request.pieces()
            sent, work = (
                sum(map(len, pieces)),
                lambda: self._ask(Shot("amplify", pieces, request.copies)),
            )
        self._tell("begin")
        began = time.perf_counter()
        status, answered = work()
        seconds = time.perf_counter() - began
        told = self._tell("end")
        return Cost(
            told["growth_bytes"] - answered - sent, told["stall_seconds"], status, answered, seconds
        )

    def ask(self, request: Request) -> Reply | None:
        """Return the answer to a request without measuring it; None if there is none."""
        outcome = asyncio.run(
            Peer(self.host, self.port).ask(Shot("amplify", request.pieces(), request.copies))
        )
        return outcome.replies[0] if outcome.replies else None

    def _ask(self, shot: Shot) -> tuple[str, int]:
        outcome = asyncio.run(Peer(self.host, self.port).ask(shot))
        status = (
            "hung"
            if outcome.hung
            else str(outcome.replies[-1].status)
            if outcome.replies
            else outcome.broken or "closed"
        )
        return status, sum(len(reply.body) for reply in outcome.replies)

    def _tell(self, word: str) -> Any:
        self._lines.write(f"{word}\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the server ended")
        return json.loads(line)


@contextmanager
def running(
    command: Sequence[str], *, port: int, rpc_port: int | None = None, log: Path, **variables: str
) -> Iterator[Target]:
    """A server until the block is left. `command`: with `{probe}` in the place of the descriptor.
    Raises RuntimeError."""
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
        with ours.makefile("rw") as lines:
            yield Target(port, lines, rpc_port)


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
