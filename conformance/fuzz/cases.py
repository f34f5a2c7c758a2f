"""Kept cases: requests that other servers die of, or that no test of ours asks for, and the statuses that are right.

What fuzzing finds here gets a test of the module that was wrong, and needs no case.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from conformance.fuzz.heads import request
from conformance.fuzz.judge import faults
from conformance.fuzz.peer import Peer
from conformance.fuzz.servers import Server
from conformance.fuzz.shot import Shot
from conformance.fuzz.storm import Finding

HEAD = re.compile(rb"( HTTP/1\.[01]\r\n)")
NOTHING = Shot("none", (b"",))
JSON = (b"Content-Type", b"application/json")


@dataclass(frozen=True)
class Kept:
    """A shot, and how each of its answers is to begin: a status, or a class of them, such as 4xx. `models`: whose it is."""

    name: str
    shot: Shot
    statuses: tuple[str, ...]
    models: tuple[str, ...]
    why: str


def read() -> Iterator[Kept]:
    """All of them."""
    for name, models, statuses, data, why in (*_deadly_elsewhere(), *_other()):
        wanted = tuple(statuses.split())
        yield Kept(name, Shot(name, (data,), answers=len(wanted)), wanted, tuple(models.split()), why)


def _post(path: bytes, body: bytes | Any, *headers: tuple[bytes, bytes]) -> bytes:
    return request(path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers or (JSON,))


def _deadly_elsewhere() -> Iterator[tuple[str, str, str, bytes, str]]:
    """(name, models whose it is, statuses, bytes, why)"""
    why = "TEI 1.9.3 ends: no id of the vocabulary is left"
    yield "id-outside-the-vocabulary", "hybrid splade", "422|424", _post(b"/embed", {"inputs": [[999_999]]}), why
    why = "TEI 1.9.3 ends on XLM-R: the text of these ids has no tokens"
    yield "id-without-a-text", "hybrid", "200|422", _post(b"/embed", {"inputs": [[8]]}), why
    why, long = "TEI 1.9.3 works for 8.7 s and takes 3.1 GB: both sides of a pair are long", "a b " * 8000
    yield "long-pair", "reranker", "200", _post(b"/rerank", {"query": long, "texts": [long], "truncate": True}), why
    body = {"inputs": [7] * 100_000, "truncate": True}
    yield "many-ids", "hybrid splade", "200|422", _post(b"/embed_sparse", body), "TEI computes them all"
    body = {"inputs": "\u0301" * 30_000, "truncate": True}
    yield "marks-only", "hybrid", "200|4xx", _post(b"/embed", body), "one word of marks"


def _other() -> Iterator[tuple[str, str, str, bytes, str]]:
    body, why = b'{"inputs":"a","x":' + b"9" * 5000 + b"}", "Python refuses to read 4,300 digits, here of an unknown field"
    yield "long-integer-unknown", "", "200|4xx", _post(b"/embed", body), why
    yield "nul-in-a-text", "", "200|4xx", _post(b"/embed", b'{"inputs":"a\\u0000b"}'), "NUL as a character"
    body = {"inputs": "a", "parameters": {"top_k": 10**30}}
    yield "top-k-of-ages", "classifier", "200|4xx", _post(b"/predict", body), "beyond 64 bits"
    fine, gone = _post(b"/tokenize", {"inputs": "baka"}), b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "pipelined", "", "200 404 200", fine + gone + fine, "answers keep their order"
    yield "http-1.0", "", "200", fine.replace(b"HTTP/1.1", b"HTTP/1.0"), "an old client"
    bomb = gzip.compress(bytes(30_000_000), 9)
    yield "gzip-bomb", "", "415", _post(b"/embed", bomb, JSON, (b"Content-Encoding", b"gzip")), "30 kB that would become 30 MB"
    packed = b"\xdd\xff\xff\xff\xff" * 10
    yield "msgpack-bomb", "", "415", _post(b"/embed", packed, (b"Content-Type", b"application/msgpack")), "not read here"


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
