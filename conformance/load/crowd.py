"""Many connections of one process, each a request at a time: bytes in, bytes out, by epoll alone,
since it shares the machine.

    crowd(port, [Group(640, requests), Group(20, requests, pause_seconds=1.0)], seconds)

runs in a process of its own and returns what each group saw. asyncio's clients would take as much
of two cores as the server.
"""

import heapq
import multiprocessing
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from conformance.load.servers import HOST

# For answers that are due when the time is over
LAST_SECONDS = 15.0
READ_BYTES, POLL_SECONDS = 262_144, 0.05


def request(path: str, body: object) -> bytes:
    """A whole HTTP request of JSON."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(content)}\r\n\r\n"
    )
    return head.encode() + content


@dataclass(frozen=True)
class Group:
    """Connections that begin at different requests, so that no two send the same request at the
    same time. Each sends its next request `pause_seconds` after a refusal, and immediately after
    any other answer."""

    connections: int
    requests: Sequence[bytes]
    pause_seconds: float = 0.0


@dataclass
class Seen:
    """Answers by status, seconds of each accepted and each refused request, how often each request
    was accepted before the time was over, connections that ended or still had no answer
    `LAST_SECONDS` later."""

    statuses: Counter[int] = field(default_factory=Counter)
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    in_time: Counter[int] = field(default_factory=Counter)
    missing: int = 0


def crowd(port: int, groups: Sequence[Group], seconds: float) -> list[Seen]:
    """What all saw of requests that were sent within `seconds`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, port, groups, seconds))
    process.start()
    # Or a crowd that fails would leave `recv` waiting
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    finally:
        process.join()


class Client:
    """One connection. `asked`: the time at which its request was sent; None without an open
    request."""

    def __init__(
        self, port: int, requests: Sequence[bytes], turn: int = 0, pause_seconds: float = 0.0
    ) -> None:
        self.requests, self.turn, self.pause_seconds = requests, turn, pause_seconds
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.asked: float | None = None
        self._answer = b""

    def ask(self) -> None:
        self.turn = (self.turn + 1) % len(self.requests)
        self.asked = time.perf_counter()
        self.socket.sendall(self.requests[self.turn])

    def hear(self) -> int | None:
        """Read; the status of an answer that is complete. Raises ConnectionError."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._answer = self._answer + data if self._answer else data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end or len(body) < int(
            head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0]
        ):
            return None
        self._answer = b""
        return int(head[9:12])

    def answer(self) -> int:
        """Wait for the status of the whole answer. Raises ConnectionError."""
        while (status := self.hear()) is None:
            pass
        return status


def _run(results: Any, port: int, groups: Sequence[Group], seconds: float) -> None:
    seen = [Seen() for _ in groups]
    clients: dict[int, tuple[Client, Seen]] = {}
    polled = select.epoll()
    for group, one in zip(groups, seen, strict=True):
        for place in range(group.connections):
            turn = place * len(group.requests) // group.connections
            client = Client(port, group.requests, turn, group.pause_seconds)
            clients[client.socket.fileno()] = client, one
            polled.register(client.socket.fileno(), select.EPOLLIN)
    end = time.perf_counter() + seconds
    for client, _ in clients.values():
        client.ask()
    # When to ask again
    later: list[tuple[float, int]] = []
    while (now := time.perf_counter()) < end or (
        now < end + LAST_SECONDS and any(one.asked for one, _ in clients.values())
    ):
        for number, _ in polled.poll(
            min(max(later[0][0] - now, 0.0), POLL_SECONDS) if later else POLL_SECONDS
        ):
            client, one = clients[number]
            status = _answered(client, one, end)
            if status is None or time.perf_counter() >= end:
                continue
            if status != 200 and client.pause_seconds:
                heapq.heappush(later, (time.perf_counter() + client.pause_seconds, number))
            else:
                client.ask()
        while later and later[0][0] <= time.perf_counter() < end:
            clients[heapq.heappop(later)[1]][0].ask()
    for client, one in clients.values():
        one.missing += client.asked is not None
    results.send(seen)


def _answered(client: Client, seen: Seen, end: float) -> int | None:
    """Read and count; the status of an answer that is complete."""
    try:
        status = client.hear()
    except OSError:
        seen.missing += 1
        client.asked = None
        # And is polled no more
        client.socket.close()
        return None
    now = time.perf_counter()
    if status is None or client.asked is None:
        return None
    seen.statuses[status] += 1
    (seen.accepted if status == 200 else seen.refused).append(now - client.asked)
    seen.in_time[client.turn] += status == 200 and now < end
    client.asked = None
    return status
