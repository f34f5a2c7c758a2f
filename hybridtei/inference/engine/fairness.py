"""The order in which sequences of many requests wait, and the bound on how much of what comes later goes first.

`FairQueue` orders sequences by tags; identical ones wait as one. A request's tags grow with each token it asks for, and the
lowest tag runs first. So a request's thousandth text waits behind another's five-token query, and nothing starves, as virtual
time moves on with what is served (start-time fair queueing, Goyal et al. 1996).

`Arrivals` keeps the bound, over all queues of a model: of what came later than a request, at most `OVERTAKEN` times the
request's own tokens are taken before the last of its sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from hybridtei.batch import Encoding
from hybridtei.inference.engine.scheduler import EngineRequest

CallerPlace = tuple[EngineRequest, int]  # a request, and the place of the sequence in it

OVERTAKEN = 2  # times its own tokens that later work may be taken before a request
OVERTAKEN_BY_BULK = 1  # of these, by bulk work, where short requests have lanes of their own and must not wait for a bulk lane


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """One sequence, and the requests that wait for it; `tag` is the lowest of theirs."""

    tag: int
    number: int  # arrival, among all queues of the model
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
class _Arrival:
    """A request that waits. `number`: the last sequence's at its arrival. `left`: its sequences that wait."""

    number: int
    tokens: int
    left: int
    waiting_tokens: int  # at its arrival, its own included
    gone_tokens: int  # before its arrival


class Arrivals:
    """What waits in the queues of one model, in the order in which it came. Not thread-safe."""

    def __init__(self) -> None:
        self.tokens = 0
        self._gone_tokens = 0  # of all sequences that have left the queues
        self._last = -1
        self._waiting: dict[int, int] = {}  # tokens of each sequence by its number, ascending
        self._requests: dict[EngineRequest, _Arrival] = {}

    def enter(self, tokens: int) -> int:
        """Return the number of a sequence that begins to wait."""
        self._last += 1
        self._waiting[self._last] = tokens
        self.tokens += tokens
        return self._last

    def opened(self, request: EngineRequest, sequences: int, tokens: int) -> None:
        """A request has entered `sequences` of so many `tokens` together."""
        self._requests[request] = _Arrival(self._last, tokens, sequences, self.tokens, self._gone_tokens)

    def leave(self, sequences: Sequence[Waiting]) -> None:
        """They wait no more."""
        for waiting in sequences:
            tokens = self._waiting.pop(waiting.number)
            self.tokens -= tokens
            self._gone_tokens += tokens
            for request, _ in waiting.callers:
                arrival = self._requests[request]
                arrival.left -= 1
                if not arrival.left:
                    del self._requests[request]

    def allow(self, chosen: Sequence[Waiting], bound: int = OVERTAKEN) -> bool:
        """Whether every request that goes on waiting stays within `bound` times its tokens if these are taken now."""
        if len(self._requests) < 2:
            return True
        leaving = Counter(request for waiting in chosen for request, _ in waiting.callers)
        arrived = sorted((waiting.number, len(waiting)) for waiting in chosen)
        later, before, place = sum(tokens for _, tokens in arrived), 0, 0
        waiting = iter(self._waiting.items())
        number, tokens = next(waiting)
        for request, arrival in self._requests.items():  # in order of arrival, so each list is read once
            while number <= arrival.number and tokens:
                before += tokens
                number, tokens = next(waiting, (number, 0))
            while place < len(arrived) and arrived[place][0] <= arrival.number:
                later -= arrived[place][1]
                place += 1
            if not later:
                return True
            overtaken = self._gone_tokens - arrival.gone_tokens - (arrival.waiting_tokens - before)
            stays = arrival.left > leaving[request] and not (request.cancelled or request.done)
            if stays and overtaken + later > bound * arrival.tokens:
                return False
        return True


class FairQueue:
    """Not thread-safe. `arrivals`: of the model, where it has several queues."""

    def __init__(self, arrivals: Arrivals | None = None) -> None:
        self.tokens = 0
        self.shared = 0  # sequences, ever, that waited here already when they were added
        self._queue: list[Waiting] = []
        self._by_key: dict[bytes, Waiting] = {}  # in order of arrival
        self._virtual_time = 0
        self._arrivals = arrivals or Arrivals()

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
                number = self._arrivals.enter(len(encoding))
                waiting = Waiting(tag + len(encoding), number, encoding, key, [(request, place)])
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

    @property
    def oldest(self) -> list[Waiting]:
        """What came first of all that some request waits for; nothing if none does."""
        return list(islice((waiting for waiting in self._by_key.values() if waiting.awaited), 1))

    def remove(self, chosen: Sequence[Waiting]) -> None:
        """Remove some of what waits. Virtual time moves on to the lowest tag."""
        self._virtual_time = max(self._virtual_time, self._queue[0].tag)
        numbers = {waiting.number for waiting in chosen}
        end = bisect_left(self._queue, max(chosen)) + 1
        self._queue[:end] = [waiting for waiting in self._queue[:end] if waiting.number not in numbers]
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
