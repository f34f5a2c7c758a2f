"""The order in which sequences of many requests wait.

`FairQueue` orders sequences by tags; identical ones wait as one. A request's tags grow with each token it asks for, and the
lowest tag runs first. So a request's thousandth text waits behind another's five-token query, and nothing starves, as virtual
time moves on with what is served (start-time fair queueing, Goyal et al. 1996).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hybridtei.batch import Encoding
from hybridtei.engine.scheduler import EngineRequest

CallerPlace = tuple[EngineRequest, int]  # a request, and the place of the sequence in it


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """One sequence, and the requests that wait for it; `tag` is the lowest of theirs."""

    tag: int
    number: int  # arrival, so that equal tags keep their order
    encoding: Encoding = field(compare=False)
    callers: list[CallerPlace] = field(compare=False)

    def __len__(self) -> int:
        return len(self.encoding)

    @property
    def awaited(self) -> bool:
        """Whether any request still waits for it."""
        return any(not (caller.cancelled or caller.done) for caller, _ in self.callers)


class FairQueue:
    """Not thread-safe."""

    def __init__(self) -> None:
        self.tokens = 0
        self.shared = 0  # sequences, ever, that waited here already when they were added
        self._queue: list[Waiting] = []
        self._by_key: dict[bytes, Waiting] = {}
        self._virtual_time = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: EngineRequest, places: Sequence[int], encodings: Sequence[Encoding]) -> None:
        """Queue some sequences of one request."""
        tag = self._virtual_time
        for place in places:
            encoding = encodings[place]
            waiting = self._by_key.get(encoding.key)
            if waiting is not None:
                waiting.callers.append((request, place))
                self.shared += 1
                if tag + len(encoding) >= waiting.tag:
                    continue  # its tag is low enough already
                del self._queue[bisect_left(self._queue, waiting)]
                waiting = replace(waiting, tag=tag + len(encoding))
            else:
                waiting = Waiting(tag + len(encoding), self._arrivals, encoding, [(request, place)])
                self._arrivals += 1
                self.tokens += len(encoding)
            tag = waiting.tag
            insort(self._queue, waiting)
            self._by_key[encoding.key] = waiting

    def head(self, most: int) -> list[Waiting]:
        """Return the first `most` of the queue, after removing those that no request waits for."""
        while True:
            head = self._queue[:most]
            awaited: list[Waiting] = []
            dropped: list[Waiting] = []
            for waiting in head:  # read once: requests are cancelled at any moment, from another thread
                (awaited if waiting.awaited else dropped).append(waiting)
            if not dropped:
                return head
            self._queue[: len(head)] = awaited
            self._forget(dropped)

    def remove(self, head: Sequence[Waiting], places: Sequence[int]) -> list[Waiting]:
        """Remove those at `places` of what `head` returned, and return them. Virtual time moves on to the first one's tag."""
        taken = set(places)
        chosen = [head[place] for place in places]
        self._queue[: len(head)] = [waiting for place, waiting in enumerate(head) if place not in taken]
        self._forget(chosen)
        self._virtual_time = max(self._virtual_time, chosen[0].tag)
        return chosen

    def clear(self) -> list[Waiting]:
        """Empty the queue and return what was in it."""
        everything, self._queue = self._queue, []
        self._forget(everything)
        return everything

    def _forget(self, removed: Sequence[Waiting]) -> None:
        for waiting in removed:
            del self._by_key[waiting.encoding.key]
            self.tokens -= len(waiting)
