"""Which sequences run next. Sequences wait in the order of their turn, identical ones as one; what is chosen of them, and for
which lane, are pure functions of lengths, budgets and ages.

Fair, not blind. Every sequence has a tag: the request's share of virtual time, which grows with each token it asks for, and
the lowest tag runs first. So a request's thousandth text waits behind someone's five-token query, and nothing starves, as
virtual time moves on with what is served (start-time fair queueing, Goyal et al. 1996).

Where nothing is padded, arrival order is kept and gaps are filled with what still fits. Where something is, like lengths go
together with the one whose turn it is: in a rectangle a batch costs `sequences * longest`, and where only attention has one,
as much less as attention costs less than everything else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hybridtei.batch import Encoding, Head, Padding
from hybridtei.outputs import HeadOutputs
from hybridtei.system.cpu import LaneKind


class Caller(Protocol):
    """Who asked for a sequence."""

    heads: frozenset[Head]
    added_ns: int
    cancelled: bool

    @property
    def done(self) -> bool: ...


CallerPlace = tuple[Caller, int]  # a request, and the place of the sequence in it


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """One sequence, and everyone who waits for it: of their turns it takes the earliest."""

    tag: int
    number: int  # arrival, so that equal tags keep their order
    encoding: Encoding = field(compare=False)
    callers: list[CallerPlace] = field(compare=False)

    def __len__(self) -> int:
        return len(self.encoding)

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return any(not (caller.cancelled or caller.done) for caller, _ in self.callers)


class FairQueue:
    """Not thread-safe."""

    def __init__(self) -> None:
        self.tokens = 0
        self.shared = 0  # sequences, ever, that were found waiting here already
        self._queue: list[Waiting] = []
        self._by_key: dict[bytes, Waiting] = {}
        self._virtual_time = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, caller: Caller, places: Sequence[int], encodings: Sequence[Encoding]) -> None:
        """Queue some sequences of one request."""
        tag = self._virtual_time
        for place in places:
            encoding = encodings[place]
            waiting = self._by_key.get(encoding.key)
            if waiting is not None:
                waiting.callers.append((caller, place))
                self.shared += 1
                if tag + len(encoding) >= waiting.tag:
                    continue  # its turn comes early enough, and is another's
                del self._queue[bisect_left(self._queue, waiting)]
                waiting = replace(waiting, tag=tag + len(encoding))
            else:
                waiting = Waiting(tag + len(encoding), self._arrivals, encoding, [(caller, place)])
                self._arrivals += 1
                self.tokens += len(encoding)
            tag = waiting.tag
            insort(self._queue, waiting)
            self._by_key[encoding.key] = waiting

    def head(self, most: int) -> list[Waiting]:
        """The first `most` of the queue, after those that nobody waits for any more were removed."""
        while True:
            head = self._queue[:most]
            wanted: list[Waiting] = []
            gone: list[Waiting] = []
            for waiting in head:  # asked once: callers leave at any moment, from another thread
                (wanted if waiting.wanted else gone).append(waiting)
            if not gone:
                return head
            self._queue[: len(head)] = wanted
            self._forget(gone)

    def remove(self, head: Sequence[Waiting], places: Sequence[int]) -> list[Waiting]:
        """Take those at `places` of what `head` gave, out of the queue; virtual time moves on to the first one's turn."""
        taken = set(places)
        chosen = [head[place] for place in places]
        self._queue[: len(head)] = [waiting for place, waiting in enumerate(head) if place not in taken]
        self._forget(chosen)
        self._virtual_time = max(self._virtual_time, chosen[0].tag)
        return chosen

    def clear(self) -> list[Waiting]:
        """Empty the queue; what was in it."""
        everything, self._queue = self._queue, []
        self._forget(everything)
        return everything

    def _forget(self, gone: Sequence[Waiting]) -> None:
        for waiting in gone:
            del self._by_key[waiting.encoding.key]
            self.tokens -= len(waiting)


EXPRESS_TOKENS = 48  # longest request that is express: some milliseconds of one core
EXPRESS_BACKLOG_TOKENS = 8192  # beyond so many waiting, what is short is bulk in small pieces, and has to share with it
PATIENCE_NS = 2_000_000_000  # bulk of which none was served for so long may take an express lane
ALLOWED = {Padding.ATTENTION: 1.06, Padding.ALL: 1.25}  # a batch may cost so many times its useful tokens
ATTENTION_TOKENS = 1000  # length of texts of which attention costs as much as the rest, in small models
LEAST_SHARE_TOKENS = 128  # a batch of fewer leaves a core's arithmetic waiting for weights


def lane_for(request_tokens: int, backlog_tokens: int) -> LaneKind:
    """Lane of a request of so many tokens, where so many wait on the express side already."""
    short = request_tokens <= EXPRESS_TOKENS and backlog_tokens + request_tokens <= EXPRESS_BACKLOG_TOKENS
    return LaneKind.EXPRESS if short else LaneKind.BULK


def is_starving(waiting_since_ns: int, last_served_ns: int, now_ns: int) -> bool:
    """Whether bulk work has waited too long without any of it being served."""
    return now_ns - max(waiting_since_ns, last_served_ns) > PATIENCE_NS


def share(waiting_tokens: int, lanes: int, max_tokens: int) -> int:
    """Budget of one batch where `lanes` of them share what waits: none should take all of it while another has nothing."""
    return min(max_tokens, max(LEAST_SHARE_TOKENS, -(-waiting_tokens // lanes)))


def price(useful: int, sequences: int, longest: int, padding: Padding) -> float:
    """What a batch costs, in tokens."""
    if padding is Padding.NONE:
        return useful
    wasted = sequences * longest - useful
    return useful + (wasted if padding is Padding.ALL else wasted * longest / ATTENTION_TOKENS)


def choose(
    waiting: Sequence[int], *, max_tokens: int, max_sequences: int | None = None, padding: Padding = Padding.NONE
) -> list[int]:
    """Places in `waiting` (lengths in tokens, whose turn it is first) of those that run next, ascending.

    At least the first is chosen if any wait, however long it is, so the queue moves. Same queue in, same batch out.
    """
    if not waiting:
        return []
    order = range(len(waiting))
    by_likeness = sorted(order, key=lambda i: abs(waiting[i] - waiting[0])) if padding is not Padding.NONE else order
    chosen, useful, longest = [0], waiting[0], waiting[0]
    for i in by_likeness:
        if i == 0:
            continue
        if max_sequences is not None and len(chosen) >= max_sequences:
            break
        if padding is Padding.NONE and useful >= max_tokens:
            break
        tall = max(longest, waiting[i])
        cost = price(useful + waiting[i], len(chosen) + 1, tall, padding)
        if cost > max_tokens or (padding in ALLOWED and cost > ALLOWED[padding] * (useful + waiting[i])):
            continue
        chosen.append(i)
        useful, longest = useful + waiting[i], tall
    return sorted(chosen)


ENTRY_BYTES = 600  # of Python objects around the arrays of one entry


class ResultCache:
    """Not thread-safe. A text that is asked for further outputs is computed again, and kept with those."""

    def __init__(self, most_bytes: int) -> None:
        self.hits = self.misses = self.bytes = 0
        self._most = most_bytes
        self._entries: OrderedDict[bytes, tuple[frozenset[Head], HeadOutputs, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, encoding: Encoding, heads: frozenset[Head]) -> HeadOutputs | None:
        """What a pass computed for these ids, if it was asked for all of `heads` then."""
        entry = self._entries.get(encoding.key)
        if entry is None or not heads <= entry[0]:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(encoding.key)
        return entry[1].only(heads)

    def keep(self, encoding: Encoding, heads: frozenset[Head], row: HeadOutputs) -> None:
        """Remember one sequence's outputs, if there is room for them at all."""
        size = row.nbytes + len(encoding.key) + ENTRY_BYTES
        if size > self._most:
            return
        self._drop(encoding.key)
        self._entries[encoding.key] = (heads, row, size)
        self.bytes += size
        while self.bytes > self._most:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[2]
