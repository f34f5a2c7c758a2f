"""The order in which sequences of many requests wait, and the bound on how much of what comes later goes first.

`FairQueue` orders sequences by tags; identical ones wait as one. A request's tags grow with each token it asks for, and the
lowest tag runs first. So a request's thousandth text waits behind another's five-token query, and nothing starves, as virtual
time moves on with what is served (start-time fair queueing, Goyal et al. 1996).

`Arrivals` bounds that order. What comes to a queue after a request may go before the request's last sequence for so many of the
request's tokens (`OVERTAKEN`, over all queues of a model); then the request's turn has come.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from hybridtei.batch import Encoding
from hybridtei.inference.engine.scheduler import EngineRequest
from hybridtei.system.machine import LaneKind

CallerPlace = tuple[EngineRequest, int]  # a request, and the place of the sequence in it

OVERTAKEN = 2.0  # times its own tokens that later work may be taken before a request
OVERTAKEN_BY_BULK = 0.25  # of these, where short requests have lanes of their own and must not wait for a bulk lane


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """One sequence, and the requests that wait for it; `tag` is the lowest of theirs."""

    tag: int
    arrived: int  # tokens that had come to its queue, its own included
    encoding: Encoding = field(compare=False)
    key: bytes = field(compare=False)  # of the encoding
    callers: list[CallerPlace] = field(compare=False)

    def __len__(self) -> int:
        return len(self.encoding)

    @property
    def awaited(self) -> bool:
        """Whether any request still waits for it."""
        return any(not (caller.cancelled or caller.done) for caller, _ in self.callers)


@dataclass(slots=True)
class _Turn:
    """A request that waits. `left`: its sequences that wait. `limits`: what may be taken of each queue before the last of them,
    by `Waiting.arrived`."""

    left: int
    limits: dict[LaneKind, float]


class Arrivals:
    """The requests that wait in the queues of one model, and what may be taken before each. Not thread-safe.

    `overtaken`: for each queue, how many times a request's tokens may be taken before it of what came later.
    """

    def __init__(self, overtaken: Mapping[LaneKind, float]) -> None:
        self._overtaken = overtaken
        self._tokens = dict.fromkeys(overtaken, 0)  # that ever came to each queue
        self._turns: dict[EngineRequest, _Turn] = {}

    def enter(self, kind: LaneKind, tokens: int) -> int:
        """Return the tokens that have come to a queue with a sequence that begins to wait there."""
        self._tokens[kind] += tokens
        return self._tokens[kind]

    def opened(self, request: EngineRequest, sequences: int, tokens: int) -> None:
        """A request has entered `sequences` of so many `tokens` together."""
        limits = {kind: self._tokens[kind] + times * tokens for kind, times in self._overtaken.items()}
        self._turns[request] = _Turn(sequences, limits)

    def leave(self, sequences: Sequence[Waiting]) -> None:
        """They wait no more."""
        for waiting in sequences:
            for request, _ in waiting.callers:
                turn = self._turns[request]
                turn.left -= 1
                if not turn.left:
                    del self._turns[request]

    def limit(self, kind: LaneKind, chosen: Sequence[Waiting] = ()) -> float:
        """Return how much may be taken of a queue now, by `Waiting.arrived`, if `chosen` is taken too."""
        if len(self._turns) < 2:  # none waits but the one
            return inf
        leaving = Counter(request for waiting in chosen for request, _ in waiting.callers)
        return min(
            (
                turn.limits[kind]
                for request, turn in self._turns.items()
                if turn.left > leaving[request] and not (request.cancelled or request.done)
            ),
            default=inf,
        )


class FairQueue:
    """Not thread-safe. `kind`: of the lanes that take from it. `arrivals`: of the model, where it has several queues."""

    def __init__(self, kind: LaneKind = LaneKind.BULK, arrivals: Arrivals | None = None) -> None:
        self.kind = kind
        self.tokens = 0
        self.shared = 0  # sequences, ever, that waited here already when they were added
        self._queue: list[Waiting] = []
        self._by_key: dict[bytes, Waiting] = {}  # in order of arrival
        self._virtual_time = 0
        self._arrivals = arrivals or Arrivals({kind: OVERTAKEN})

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: EngineRequest, places: Sequence[int], encodings: Sequence[Encoding]) -> None:
        """Queue some sequences of one request."""
        tag = self._virtual_time
        for place in places:
            encoding = encodings[place]
            key = encoding.key
            waiting = self._by_key.get(key)
            if waiting is not None:
                waiting.callers.append((request, place))
                self.shared += 1
                if tag + len(encoding) >= waiting.tag:
                    continue  # its tag is low enough already
                del self._queue[bisect_left(self._queue, waiting)]
                waiting = replace(waiting, tag=tag + len(encoding))
            else:
                arrived = self._arrivals.enter(self.kind, len(encoding))
                waiting = Waiting(tag + len(encoding), arrived, encoding, key, [(request, place)])
                self.tokens += len(encoding)
            tag = waiting.tag
            insort(self._queue, waiting)
            self._by_key[key] = waiting
        self._arrivals.opened(request, len(places), sum(len(encodings[place]) for place in places))

    def head(self, size: int) -> list[Waiting]:
        """Return the first `size` of the queue, after removing those that no request waits for."""
        while True:
            head = self._queue[:size]
            awaited: list[Waiting] = []
            dropped: list[Waiting] = []
            for waiting in head:  # read once: requests are cancelled at any moment, from another thread
                (awaited if waiting.awaited else dropped).append(waiting)
            if not dropped:
                return head
            self._queue[: len(head)] = awaited
            self._forget(dropped)

    def first_come(self, tokens: int) -> list[Waiting]:
        """Return what some request waits for, in order of arrival: the first `tokens` of it, and what may be taken before any
        of these."""
        limit = self._arrivals.limit(self.kind)
        found: list[Waiting] = []
        for waiting in self._by_key.values():
            if waiting.awaited:
                tokens -= len(waiting)
                if found and tokens < 0 and waiting.arrived > limit:
                    break
                found.append(waiting)
        return found

    def allowed(self, chosen: Sequence[Waiting]) -> list[Waiting]:
        """Return the part of a choice that may be taken now."""
        limit = self._arrivals.limit(self.kind, chosen)
        return [waiting for waiting in chosen if waiting.arrived <= limit]

    def remove(self, chosen: Sequence[Waiting]) -> None:
        """Remove some of what waits. Virtual time moves on to the lowest tag."""
        self._virtual_time = max(self._virtual_time, self._queue[0].tag)
        arrived = {waiting.arrived for waiting in chosen}
        end = bisect_left(self._queue, max(chosen)) + 1
        self._queue[:end] = [waiting for waiting in self._queue[:end] if waiting.arrived not in arrived]
        self._forget(chosen)

    def clear(self) -> list[Waiting]:
        """Empty the queue and return what was in it."""
        everything, self._queue = self._queue, []
        self._forget(everything)
        return everything

    def _forget(self, removed: Sequence[Waiting]) -> None:
        self._arrivals.leave(removed)
        for waiting in removed:
            del self._by_key[waiting.key]
            self.tokens -= len(waiting)
