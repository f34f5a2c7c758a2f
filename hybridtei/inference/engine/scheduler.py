"""Requests, their order in a queue, and the choice of the sequences that run next.

`FairQueue` orders sequences by tags; identical ones wait as one. A request's tags grow with each of
its tokens, and the lowest tag runs first. So a request's thousandth text waits for another
request's five-token query. Nothing starves, since virtual time advances with served tokens
(start-time fair queueing, Goyal et al. 1996). `Arrivals` bounds that order: later work may overtake
a request's last sequence by at most `OVERTAKEN` times the request's tokens, over all queues of a
model. Then it is the request's turn.

`choose` and `lane_for` are functions of lengths, budgets and ages. Without padding, sequences keep
their order, and smaller ones fill gaps. With padding, sequences of similar length join the first: a
padded batch costs `sequences * longest`, and if only attention is padded, the same share of
attention's cost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import eq
from typing import TYPE_CHECKING

from hybridtei.batch import Encoding, Head, Padding
from hybridtei.outputs import HeadOutputs, Timings
from hybridtei.system.machine import LaneKind

if TYPE_CHECKING:
    import asyncio


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One request from submit to join: its sequences, the outputs so far, its times, and its
    caller's future.

    `waiter`: set by an engine whose caller awaits the request; `EngineCore` does not use it.
    """

    encodings: Sequence[Encoding]
    heads: frozenset[Head]
    added_ns: int
    cancelled: bool = False
    error: BaseException | None = None
    queue_ns: int = 0
    inference_ns: int = 0
    waiter: asyncio.Future[None] | None = None
    _parts: list[tuple[Sequence[int], HeadOutputs]] = field(default_factory=list)
    _missing: int = 0

    def __post_init__(self) -> None:
        # A request without heads needs no forward pass
        self._missing = len(self.encodings) if self.heads else 0

    @property
    def done(self) -> bool:
        return self._missing == 0 or self.error is not None

    def wake(self, error: BaseException | None = None) -> None:
        """Resume the caller on its event loop, perhaps with `error`. No effect if it was resumed or
        cancelled before."""
        if self.waiter is not None and not self.waiter.done():
            self.error = error or self.error
            self.waiter.set_result(None)

    def keep(self, places: Sequence[int], outputs: HeadOutputs) -> None:
        """Add the outputs of some sequences."""
        self._parts.append((places, outputs))
        self._missing -= len(places)

    def outputs(self) -> HeadOutputs:
        """Return the outputs of all sequences, in the request's order. Raises the error of a failed
        batch, and NotANumber."""
        if self.error is not None:
            raise self.error
        if len(self._parts) == 1:
            ((places, outputs),) = self._parts
        else:
            places = [place for part, _ in self._parts for place in part]
            outputs = HeadOutputs.concat([outputs for _, outputs in self._parts])
        # `places` is a list, or a range of another process
        if not all(map(eq, places, range(len(places)))):
            outputs = outputs.take(sorted(range(len(places)), key=places.__getitem__))
        outputs.check_finite()
        return outputs

    def timings(self) -> Timings:
        """The times, as means over the sequences."""
        n = max(len(self.encodings), 1)
        return Timings(queue_ns=self.queue_ns // n, inference_ns=self.inference_ns // n)


# Tokens of the longest express request: some milliseconds of one core
EXPRESS_TOKENS = 48
# With more waiting tokens, short requests are bulk work in small pieces
EXPRESS_BACKLOG_TOKENS = 8192
# The bound of a batch's cost, as a multiple of its useful tokens
ALLOWED = {Padding.ATTENTION: 1.06, Padding.ALL: 1.25}
# The length of texts in which attention costs as much as the rest, in small models
ATTENTION_TOKENS = 1000
# In smaller batches a core waits for memory
MIN_SHARE_TOKENS = 128


def lane_for(request_tokens: int, backlog_tokens: int) -> LaneKind:
    """Return the lane of a request, given the tokens that already wait for express lanes."""
    short = (
        request_tokens <= EXPRESS_TOKENS
        and backlog_tokens + request_tokens <= EXPRESS_BACKLOG_TOKENS
    )
    return LaneKind.EXPRESS if short else LaneKind.BULK


def share(
    lengths: Sequence[int],
    waiting_tokens: int,
    lanes: int,
    max_tokens: int,
    *,
    idle: bool = False,
    burst: int = 0,
    prefix: int = 0,
) -> int:
    """Return the token budget of one batch. Each rule edits what the rule above it left.

    | if | the budget is |
    | --- | --- |
    | always | a lane's part of the waiting tokens, so that no lane takes all while another idles;
    at least MIN_SHARE_TOKENS |
    | `idle`, one pass holds all, a sequence is longer than the part | `max_tokens`, since dividing
    would not end earlier |
    | always | at least `burst`, the budget of the lane that began the burst |
    | all `lengths` fit if `prefix` tokens are added | all of them, since a second pass would
    compute the prefix again |

    `lengths`: of the next sequences. `idle`: no pass runs.
    """
    part = -(-waiting_tokens // lanes)
    budget = min(max_tokens, max(MIN_SHARE_TOKENS, part))
    if idle and waiting_tokens <= max_tokens and max(lengths, default=0) > part:
        budget = max_tokens
    budget = max(budget, burst)
    if prefix and sum(lengths) <= budget + prefix:
        budget = max(budget, sum(lengths))
    return budget


def price(useful: int, sequences: int, longest: int, padding: Padding, prefix: int = 0) -> float:
    """Return the cost of a batch in tokens: useful ones and padding. `prefix`: as for `choose`."""
    if padding is Padding.NONE:
        return useful
    padded = sequences * longest - useful
    if padding is Padding.ALL:
        return useful + padded
    return useful + padded * (prefix + longest) / ATTENTION_TOKENS


def choose(
    waiting: Sequence[int],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    padding: Padding = Padding.NONE,
    prefix: int = 0,
    shared_tokens: int = 0,
) -> list[int]:
    """Return the ascending places in `waiting` (lengths in tokens, in order of turn) of the
    sequences that run next.

    The first is always chosen, even if it is too long, so that the queue never stops. Equal queues
    give equal batches.

    `prefix`: the tokens before each sequence that a batch computes once. Padding may cost up to
    `prefix` more, since another batch would compute the prefix again. With the prefix counted for
    each sequence, a batch has at most `shared_tokens` tokens.
    """
    if len(waiting) < 2:
        return [*range(len(waiting))]
    order = range(len(waiting))
    by_length: Sequence[int] = order
    if padding is not Padding.NONE:
        by_length = sorted(order, key=[abs(tokens - waiting[0]) for tokens in waiting].__getitem__)
    chosen = [0]
    useful = waiting[0]
    longest = waiting[0]
    for i in by_length:
        if i == 0:
            continue
        if max_sequences is not None and len(chosen) >= max_sequences:
            break
        if padding is Padding.NONE and useful >= max_tokens:
            break
        # The batch with this sequence
        new_longest = max(longest, waiting[i])
        tokens = useful + waiting[i]
        sequences = len(chosen) + 1
        cost = price(tokens, sequences, new_longest, padding, prefix)
        if prefix:
            too_large = tokens > max_tokens or sequences * (prefix + new_longest) > shared_tokens
        else:
            too_large = cost > max_tokens
        too_padded = padding in ALLOWED and cost > ALLOWED[padding] * tokens + prefix
        if not (too_large or too_padded):
            chosen.append(i)
            useful = tokens
            longest = new_longest
    return sorted(chosen)


# A request, and the sequence's place in it
CallerPlace = tuple[EngineRequest, int]

# Later work that may overtake a request, as a multiple of the request's tokens
OVERTAKEN = 2.0
# Bulk work that may overtake a short request, which must not wait for a bulk lane
OVERTAKEN_BY_BULK = 0.25


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """One sequence, and the requests that wait for it. `tag`: the lowest of theirs."""

    tag: int
    # Tokens that have arrived at its queue, including its own
    arrived: int
    tokens: int = field(compare=False)
    encoding: Encoding = field(compare=False)
    # The encoding's key
    key: bytes = field(compare=False)
    callers: list[CallerPlace] = field(compare=False)

    def __len__(self) -> int:
        return self.tokens

    @property
    def awaited(self) -> bool:
        """True if any request still waits for it."""
        # Nearly always the first one
        request, _ = self.callers[0]
        if not (request.cancelled or request.done):
            return True
        return any(not (request.cancelled or request.done) for request, _ in self.callers[1:])


@dataclass(slots=True)
class _Turn:
    """A waiting request. `left`: the number of its waiting sequences. `limits`: for each queue, the
    `Waiting.arrived` up to which work may be taken before the last of them."""

    left: int
    limits: dict[LaneKind, float]


class Arrivals:
    """The waiting requests in one model's queues, and the work that may overtake each. Not
    thread-safe.

    `overtaken`: for each queue, the later work that may overtake a request, in times its tokens.
    """

    def __init__(self, overtaken: Mapping[LaneKind, float]) -> None:
        self._overtaken = overtaken
        # Tokens that have arrived at each queue so far
        self.tokens = dict.fromkeys(overtaken, 0)
        self._turns: dict[EngineRequest, _Turn] = {}

    def opened(self, request: EngineRequest, sequences: int, tokens: int) -> None:
        """Record a request that has entered `sequences` sequences with `tokens` tokens in total."""
        limits = {
            kind: self.tokens[kind] + times * tokens for kind, times in self._overtaken.items()
        }
        self._turns[request] = _Turn(sequences, limits)

    def leave(self, sequences: Sequence[Waiting]) -> None:
        """Remove sequences that no longer wait."""
        for waiting in sequences:
            for request, _ in waiting.callers:
                turn = self._turns[request]
                turn.left -= 1
                if not turn.left:
                    del self._turns[request]

    def limit(self, kind: LaneKind, chosen: Sequence[Waiting] = ()) -> float:
        """Return the `Waiting.arrived` up to which a queue's work may be taken now, if `chosen` is
        taken too."""
        # Nothing can overtake the only waiting request
        if len(self._turns) < 2:
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
    """A fair queue. Not thread-safe. `kind`: of its lanes. `arrivals`: the model's, shared by its
    queues."""

    def __init__(self, kind: LaneKind = LaneKind.BULK, arrivals: Arrivals | None = None) -> None:
        self.kind = kind
        self.tokens = 0
        # Count of added sequences that were waiting already
        self.shared = 0
        # By their tags
        self.order: list[Waiting] = []
        # In order of arrival
        self._by_key: dict[bytes, Waiting] = {}
        self._virtual_time = 0
        self._arrivals = arrivals or Arrivals({kind: OVERTAKEN})

    def __len__(self) -> int:
        return len(self.order)

    def add(
        self,
        request: EngineRequest,
        places: Sequence[int],
        encodings: Sequence[Encoding],
        total: int | None = None,
    ) -> None:
        """Queue some sequences of one request. `total`: their tokens, if counted."""
        tag = self._virtual_time
        if total is None:
            total = sum(len(encodings[place]) for place in places)
        for place in places:
            encoding = encodings[place]
            key, tokens = encoding.key, len(encoding.input_ids)
            waiting = self._by_key.get(key)
            if waiting is not None:
                waiting.callers.append((request, place))
                self.shared += 1
                if tag + tokens >= waiting.tag:
                    # Its tag is low enough already
                    continue
                del self.order[bisect_left(self.order, waiting)]
                waiting = replace(waiting, tag=tag + tokens)
            else:
                self._arrivals.tokens[self.kind] += tokens
                arrived = self._arrivals.tokens[self.kind]
                waiting = Waiting(tag + tokens, arrived, tokens, encoding, key, [(request, place)])
                self.tokens += tokens
            tag = waiting.tag
            insort(self.order, waiting)
            self._by_key[key] = waiting
        self._arrivals.opened(request, len(places), total)

    def head(self, size: int) -> list[Waiting]:
        """Return the first `size` sequences, after removing those without a waiting request."""
        while True:
            head = self.order[:size]
            awaited: list[Waiting] = []
            dropped: list[Waiting] = []
            # `awaited` is read once, since another thread can cancel requests at any moment
            for waiting in head:
                if waiting.awaited:
                    awaited.append(waiting)
                else:
                    dropped.append(waiting)
            if not dropped:
                return head
            self.order[: len(head)] = awaited
            self._forget(dropped)

    def first_come(self, tokens: int) -> list[Waiting]:
        """Return the first `tokens` of awaited sequences in order of arrival, and the work that may
        be taken before them."""
        limit = self._arrivals.limit(self.kind)
        work: list[Waiting] = []
        for waiting in self._by_key.values():
            if waiting.awaited:
                tokens -= waiting.tokens
                if work and tokens < 0 and waiting.arrived > limit:
                    break
                work.append(waiting)
        return work

    def allowed(self, chosen: Sequence[Waiting]) -> list[Waiting]:
        """Return the part of a choice that may be taken now."""
        limit = self._arrivals.limit(self.kind, chosen)
        return [waiting for waiting in chosen if waiting.arrived <= limit]

    def remove(self, chosen: Sequence[Waiting]) -> bool:
        """Remove waiting sequences. True if they were all. Virtual time advances to the lowest
        tag."""
        self._virtual_time = max(self._virtual_time, self.order[0].tag)
        if len(chosen) == len(self.order):
            self.order = []
            self._forget(chosen)
            return True
        arrived = {waiting.arrived for waiting in chosen}
        end = bisect_left(self.order, max(chosen)) + 1
        self.order[:end] = [
            waiting for waiting in self.order[:end] if waiting.arrived not in arrived
        ]
        self._forget(chosen)
        return False

    def clear(self) -> list[Waiting]:
        """Empty the queue. Return its sequences."""
        everything, self.order = self.order, []
        self._forget(everything)
        return everything

    def _forget(self, removed: Sequence[Waiting]) -> None:
        self._arrivals.leave(removed)
        for waiting in removed:
            del self._by_key[waiting.key]
            self.tokens -= waiting.tokens
