"""Many connections of one process, each a request at a time: bytes in, bytes out, by epoll alone, since it shares the machine.

    crowd(port, [Group(640, bodies), Group(20, bodies, pause_seconds=1.0)], seconds)

runs in a process of its own and returns what each group saw. asyncio's clients would take as much of two cores as the server.
"""

from __future__ import annotations

import heapq
import multiprocessing
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

HOST = "127.0.0.1"
LAST_SECONDS = 15.0  # for answers that are due when the time is over
READ_BYTES = 262_144
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Group:
    """So many connections; each asks again `pause_seconds` after a refusal, and at once after any other answer."""

    connections: int
    requests: Sequence[bytes]
    pause_seconds: float = 0.0


@dataclass
class Seen:
    """What a group saw: answers by status, seconds of each accepted and each refused request, how many were accepted before
    the time was over, connections that ended, and requests without an answer `LAST_SECONDS` after the end."""

    statuses: Counter[int] = field(default_factory=Counter)
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    accepted_in_time: int = 0
    lost: int = 0
    unanswered: int = 0


def crowd(port: int, groups: Sequence[Group], seconds: float) -> list[Seen]:
    """What all saw of requests that were sent within `seconds`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, port, groups, seconds))
    process.start()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    finally:
        process.join()


class _Client:
    """One connection."""

    def __init__(self, port: int, group: Group, seen: Seen, turn: int) -> None:
        self.group, self.seen, self._turn = group, seen, turn
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.asked: float | None = None
        self._answer = b""

    def ask(self) -> None:
        self._turn += 1
        self.asked = time.perf_counter()
        self.socket.sendall(self.group.requests[self._turn % len(self.group.requests)])

    def hear(self) -> int | None:
        """Read; the status of an answer that is complete. Raises ConnectionError."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError
        self._answer = self._answer + data if self._answer else data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0]):
            return None
        self._answer = b""
        return int(head[9:12])


def _run(results: object, port: int, groups: Sequence[Group], seconds: float) -> None:
    results.send(_drive(port, groups, seconds))  # type: ignore[attr-defined]


def _drive(port: int, groups: Sequence[Group], seconds: float) -> list[Seen]:
    seen = [Seen() for _ in groups]
    clients: dict[int, _Client] = {}
    polled = select.epoll()
    for group, one in zip(groups, seen, strict=True):
        for turn in range(group.connections):
            client = _Client(port, group, one, turn * 7)
            clients[client.socket.fileno()] = client
            polled.register(client.socket.fileno(), select.EPOLLIN)
    end = time.perf_counter() + seconds
    for client in clients.values():
        client.ask()
    later: list[tuple[float, int]] = []  # when to ask again
    while (now := time.perf_counter()) < end or (now < end + LAST_SECONDS and any(one.asked for one in clients.values())):
        for number, _ in polled.poll(min(max(later[0][0] - now, 0.0), POLL_SECONDS) if later else POLL_SECONDS):
            again = _heard(clients[number], end)
            if again is None:
                heapq.heappush(later, (time.perf_counter() + clients[number].group.pause_seconds, number))
            elif again:
                clients[number].ask()
        while later and later[0][0] <= time.perf_counter() < end:
            clients[heapq.heappop(later)[1]].ask()
    for client in clients.values():
        client.seen.unanswered += client.asked is not None
        client.socket.close()
    return seen


def _heard(client: _Client, end: float) -> bool | None:
    """Read and count; whether to ask again at once; None: after a pause."""
    try:
        status = client.hear()
    except OSError:
        client.seen.lost += 1
        client.asked = None
        client.socket.close()  # and is polled no more
        return False
    now = time.perf_counter()
    if status is None or client.asked is None:
        return False
    client.seen.statuses[status] += 1
    (client.seen.accepted if status == 200 else client.seen.refused).append(now - client.asked)
    client.seen.accepted_in_time += status == 200 and now < end
    client.asked = None
    if now >= end:
        return False
    return None if status != 200 and client.group.pause_seconds else True
