"""Kept cases: bytes that once went wrong here, or that others' servers die of, and the statuses that are right.

What fuzzing found is `cases/NAME.raw` beside an entry in `cases/index.toml`: which models, which statuses, why. Bytes that can
be told in a few words are made by `named` instead of being kept as megabytes.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.fuzz import named
from conformance.fuzz.judge import faults
from conformance.fuzz.peer import Peer
from conformance.fuzz.servers import Server
from conformance.fuzz.shot import Shot
from conformance.fuzz.storm import Finding

FOLDER = Path(__file__).with_name("cases")
HEAD = re.compile(rb"( HTTP/1\.[01]\r\n)")
NOTHING = Shot("none", (b"",))


@dataclass(frozen=True)
class Kept:
    """A shot, and how each of its answers is to begin: a status, or a class of them, such as 4xx. `models`: whose it is."""

    name: str
    shot: Shot
    statuses: tuple[str, ...]
    models: tuple[str, ...]
    why: str


def read() -> list[Kept]:
    """All of the folder, and those that have a name only."""
    index = tomllib.loads((FOLDER / "index.toml").read_text(encoding="utf-8"))
    found = [(name, entry, (FOLDER / f"{name}.raw").read_bytes()) for name, entry in sorted(index.items())]
    kept = [_kept(name, entry.get("models", ""), entry["status"], data, entry["why"]) for name, entry, data in found]
    return [*kept, *(_kept(*case) for case in named.cases())]


def _kept(name: str, models: str, statuses: str, data: bytes, why: str) -> Kept:
    wanted = tuple(statuses.split())
    return Kept(name, Shot(name, (data,), answers=len(wanted)), wanted, tuple(models.split()), why)


def wrong(kept: Kept, statuses: list[int]) -> str | None:
    """Why these are not the statuses that are right."""
    told = [str(status) for status in statuses]
    fits = len(told) == len(kept.statuses) and all(
        status in want.split("|") or f"{status[0]}xx" in want.split("|")
        for status, want in zip(told, kept.statuses, strict=True)
    )
    return None if fits else f"statuses {' '.join(told) or 'none'}, not {' '.join(kept.statuses)}"


def replay(server: Server, found: Callable[[Finding], object]) -> None:
    """All cases of a server's models, one after the other; those that go wrong are told."""
    for kept in read():
        if kept.models and not set(kept.models) & {*server.plan.models, server.plan.name}:
            continue
        reasons = asyncio.run(_ask(server, kept))
        if reasons:
            found(Finding(server.plan.name, tuple(reasons), kept.shot))


async def _ask(server: Server, kept: Kept) -> list[str]:
    peer = Peer(server.host, server.port)
    key = server.plan.key
    data = kept.shot.data if key is None else HEAD.sub(rb"\1Authorization: Bearer %b\r\n" % key.encode(), kept.shot.data)
    outcome = await peer.ask(replace(kept.shot, pieces=(data,)))
    peer.close()
    reason = wrong(kept, [reply.status for reply in outcome.replies])
    return [*faults(kept.shot, outcome), *([reason] if reason else [])]
