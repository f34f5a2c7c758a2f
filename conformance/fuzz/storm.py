"""A storm on one server: many connections, each with its own shots, and the same valid request
repeatedly."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conformance.fuzz.heads import Generator, request
from conformance.fuzz.judge import faults, same
from conformance.fuzz.peer import Peer
from conformance.fuzz.servers import SENTINELS, Server
from conformance.fuzz.shot import Outcome, Shot

# Shots of a connection between two valid requests
EVERY = 50
LOOK_SECONDS = 0.5
# Times that a valid request may be refused at capacity
PATIENCE = 200


@dataclass(frozen=True)
class Finding:
    """A failure, and the bytes that caused it."""

    server: str
    reasons: tuple[str, ...]
    shot: Shot


@dataclass
class Tally:
    """Counts of requests and of answers."""

    requests: int = 0
    seconds: float = 0.0
    valid: int = 0
    exactly_equal: int = 0
    # (kind of shot, status)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    # What refusals of the model's say
    errors: Counter[str] = field(default_factory=Counter)


class Storm:
    """One run against one server."""

    def __init__(
        self, server: Server, seed: str, requests: int, found: Callable[[Finding], object]
    ) -> None:
        self._server = server
        self._seed = seed
        self._left = requests
        self._found = found
        self._first: dict[str, bytes] = {}
        self.tally = Tally()

    async def run(self) -> Tally:
        """All shots; then the valid requests once more, alone."""
        began = time.monotonic()
        await self._sentinels(exactly=True)
        looking = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._client(number) for number in range(self._server.plan.peers)))
        looking.cancel()
        if self._server.status() is None:
            await self._sentinels(exactly=not self._server.plan.remembers)
        self._look()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    async def _client(self, number: int) -> None:
        plan = self._server.plan
        shots = Generator(
            f"{self._seed}/{plan.name}/{number}", self._server.aliases, plan.key, plan.longest
        )
        peer = Peer(self._server.host, self._server.port)
        turn = number * EVERY // plan.peers
        while self._left > 0 and self._server.status() is None:
            shot = shots.next()
            self._left -= max(shot.answers, 1)
            outcome = await peer.ask(shot)
            self._count(shot, outcome)
            turn += 1
            if turn % EVERY == 0:
                await self._sentinels(exactly=False)
        peer.close()

    def _count(self, shot: Shot, outcome: Outcome) -> None:
        tally = self.tally
        tally.requests += max(shot.answers, 1)
        for reply in outcome.replies:
            tally.statuses[shot.kind, str(reply.status)] += 1
            if reply.status == 424:
                tally.errors[reply.body.decode("utf-8", "replace")[:160]] += 1
        if not outcome.replies:
            tally.statuses[shot.kind, "none"] += 1
        reasons = faults(shot, outcome, self._server.plan.unread)
        if reasons:
            self._find(reasons, shot)

    def _find(self, reasons: list[str], shot: Shot) -> None:
        self._found(Finding(self._server.plan.name, tuple(reasons), shot))

    async def _sentinels(self, *, exactly: bool) -> None:
        peer = Peer(self._server.host, self._server.port)
        for alias in self._server.plan.models:
            path, body = SENTINELS[alias]
            shot = self._valid(f"/m/{alias}{path}" if self._server.aliases else path, body)
            for _ in range(PATIENCE):
                outcome = await peer.ask(shot)
                if not outcome.replies or outcome.replies[0].status != 429:
                    break
                await asyncio.sleep(0.1)
            if self._server.status() is not None:
                return
            self._compare(alias, shot, outcome, exactly=exactly)
        peer.close()

    def _compare(self, alias: str, shot: Shot, outcome: Outcome, *, exactly: bool) -> None:
        self.tally.valid += 1
        reasons = faults(shot, outcome)
        if reasons or outcome.replies[0].status != 200:
            said = (
                f"{outcome.replies[0].status} {outcome.replies[0].body[:200]!r}"
                if outcome.replies
                else "nothing"
            )
            self._find([*reasons, f"a valid request is answered with {said}"], shot)
            return
        body = outcome.replies[0].body
        first = self._first.setdefault(alias, body)
        self.tally.exactly_equal += body == first
        if body != first and (exactly or not same(json.loads(first), json.loads(body))):
            self._find(
                [f"the answer to a valid request has changed: {body[:200]!r}, not {first[:200]!r}"],
                shot,
            )

    def _valid(self, path: str, body: Any) -> Shot:
        headers = [(b"Content-Type", b"application/json")]
        if self._server.plan.key is not None:
            headers.append((b"Authorization", b"Bearer " + self._server.plan.key.encode()))
        return Shot("sentinel", (request(path.encode(), json.dumps(body).encode(), headers),))

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        self._server.look()
        for alarm in self._server.alarms():
            self._find([f"the log says: {alarm}"], Shot("log", (b"",)))
        status = self._server.status()
        if status is not None:
            self._find([f"the process ended with {status}"], Shot("process", (b"",)))
