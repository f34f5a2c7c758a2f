"""Clients that send one byte a second, and SIGTERM beside them with requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from http_load import Texts
from promises import Report, milliseconds
from quiet import counters, idle, plain, settled
from raw_http import Address, Answer, Connection, connect, request
from served import Served, grown

BODY_BYTES = 4000  # far more than will ever be sent
BYTES_BEFORE = 5  # each has sent so many of its body before anything is measured
TURNS, MEASURED = 5, 20  # alternating with as many plain requests while nobody drips
TICKS = 20  # a second, in which the bytes of that second are sent: together, they would be a burst


@asynccontextmanager
async def dripping(address: Address, number: int) -> AsyncIterator[list[Connection]]:
    """So many connections in the middle of a body that grows by a byte a second; half of them in the middle of a head."""
    body = request(address, "/embed", {"inputs": "x" * BODY_BYTES})
    in_body, in_head = body.index(b"\r\n\r\n") + 4 + BYTES_BEFORE, BYTES_BEFORE
    connections = await asyncio.gather(*(connect(address) for _ in range(number)))
    places = [in_body if place % 2 else in_head for place in range(number)]
    for connection, place in zip(connections, places, strict=True):
        connection.send(body[:place])

    async def drip() -> None:
        for tick in count():
            await asyncio.sleep(1.0 / TICKS)
            for i in range(tick % TICKS, number, TICKS):
                connections[i].send(body[places[i] : places[i] + 1])
                places[i] += 1

    running = asyncio.ensure_future(drip())
    try:
        yield connections
    finally:
        running.cancel()
        for connection in connections:
            connection.drop()


async def among_slow_clients(report: Report, address: Address, texts: Texts, number: int, most_times: float) -> None:
    """Send plain requests beside slow clients."""
    usual: list[float] = []
    answers: list[Answer] = []
    still = []
    for _ in range(TURNS):
        usual += await idle(address, texts, MEASURED)
        async with dripping(address, number) as connections:
            await asyncio.sleep(1.0)
            answers += [await plain(address, texts) for _ in range(MEASURED)]
            still.append(sum(not connection.ended for connection in connections))
        await settled(address)
    took = [answer.seconds for answer in answers]
    ratio = milliseconds(took) / milliseconds(usual)
    report.add(
        f"{number} clients at one byte a second",
        f"{len(answers)} plain requests",
        f"{milliseconds(took):.1f} ms beside them, {milliseconds(usual):.1f} ms idle ({ratio:.2f} times); p99 "
        f"{milliseconds(took, 0.99):.1f} and {milliseconds(usual, 0.99):.1f} ms; {min(still)} of the slow still connected",
        all(answer.status == 200 for answer in answers) and ratio <= most_times,
        slow_ratio=round(ratio, 2),
    )


@dataclass(frozen=True)
class Ended:
    """How accepted requests ended: statuses, and how many got no answer at all; and the server. Seconds since the signal."""

    statuses: Sequence[int]
    unanswered: int
    answered_after: float
    status: int | None
    ended_after: float


async def terminated(server: Served, address: Address, requests: Sequence[bytes], slow: int) -> Ended:
    """SIGTERM once all `requests` are inside the server, while `slow` clients hang on until the last of them is answered."""
    before = await counters(address)
    async with dripping(address, slow):
        connections = await asyncio.gather(*(connect(address) for _ in requests))
        waiting = [asyncio.ensure_future(connection.ask(data)) for connection, data in zip(connections, requests, strict=True)]
        while grown(before, await counters(address), ["te_request_count"]) < len(requests):
            await asyncio.sleep(0)
        began = time.perf_counter()
        server.terminate()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        answered_after = time.perf_counter() - began
    status = await asyncio.to_thread(server.wait)
    given = [answer for answer in answers if isinstance(answer, Answer)]
    statuses, lost = [answer.status for answer in given], len(answers) - len(given)
    return Ended(statuses, lost, answered_after, status, time.perf_counter() - began)


async def stop_in_flight(report: Report, server: Served, address: Address, requests: Sequence[bytes], slow: int) -> None:
    """The last thing that can be tried with a server."""
    ended = await terminated(server, address, requests, slow)
    refused = [status for status in ended.statuses if status != 200]
    report.add(
        f"SIGTERM with {len(requests)} requests in flight, among {slow} slow clients",
        1,
        f"{len(ended.statuses) - len(refused)} answered with 200, {len(refused)} otherwise, {ended.unanswered} not at all; "
        f"the last after {ended.answered_after:.1f} s; exit {ended.status} after {ended.ended_after:.1f} s",
        not refused and not ended.unanswered and ended.status == 0,
    )
