"""The faults of an outcome: laws that hold for the answer to any bytes."""

import json
from math import inf, isclose
from typing import Any, NoReturn

from conformance.fuzz.heads import UNKNOWN
from conformance.fuzz.shot import Outcome, Reply, Shot

# After these a server may end a connection with requests still unanswered
FINAL = frozenset({400, 408, 413, 414, 431})
# Who shares a batch may change the last digits of float32
TOLERANCE = 1e-5


def faults(shot: Shot, outcome: Outcome, unread: float = inf) -> list[str]:
    """Reasons why this is a finding. `unread`: above this number of bytes a server need not read on
    until the client gets its refusal."""
    found = []
    if outcome.hung:
        found.append("hangs")
    if outcome.broken:
        found.append(f"answers what is no HTTP: {outcome.broken}")
    found += [reason for reason in map(fault_of, outcome.replies) if reason is not None]
    missing = shot.answers - len(outcome.replies)
    ended = outcome.replies and outcome.replies[-1].status in FINAL
    excused = shot.leaves or shot.answers == UNKNOWN or ended or len(shot.data) > unread
    if missing > 0 and not excused and not outcome.hung and not outcome.broken:
        found.append(f"closes with {missing} of {shot.answers} answers missing")
    return found


def fault_of(reply: Reply) -> str | None:
    """Of one answer: an error of the server's, or a body that is not what it says."""
    if reply.status >= 500:
        return f"status {reply.status}: {reply.body[:300]!r}"
    if reply.headers.get("content-type", "").startswith("application/json") and reply.body:
        try:
            json.loads(reply.body, parse_constant=_refuse)
        except (ValueError, OSError) as error:
            return f"status {reply.status} with a body that is no JSON: {error}"
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} in JSON")


def same(one: Any, other: Any) -> bool:
    """True if two JSON values are equal, except for the last digits of floats."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)
