"""The queue: sequences of many requests in, batches out, outputs back to their requests. Knows no thread and no clock.

Where the backend has express lanes, short requests wait in a queue of their own. Each queue is fair by itself, and what came
later overtakes no request, of either queue, by more than `fairness.OVERTAKEN` times its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hybridtei.batch import Encoding, Head, PackedBatch, Padding, Positions, pack
from hybridtei.inference.engine.fairness import OVERTAKEN, OVERTAKEN_BY_BULK, Arrivals, CallerPlace, FairQueue, Waiting
from hybridtei.inference.engine.scheduler import (
    EngineRequest,
    ResultCache,
    choose,
    lane_for,
    share,
)
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind

if TYPE_CHECKING:
    from hybridtei.config import EngineConfig
    from hybridtei.inference.backends.base import Backend

LOOK_AHEAD = 512  # waiting sequences that one choice considers, at least
SHORT_TOKENS = 16  # a choice considers as many texts of this length as a pass takes, and on a GPU there are permits for them
MAX_SHARED_TOKENS = 8192  # of a batch with a common prefix, which attention reads again for each sequence


def shared_tokens(backend: Backend, config: EngineConfig) -> int:
    """Return how many tokens a batch may have whose prefix is computed once, that prefix counted for each sequence."""
    return min(MAX_SHARED_TOKENS, config.max_batch_tokens) if backend.shares_prefixes else 0


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a pass, the callers of each, and the lane whose queue they came from.

    `use_all_cores`: nothing else runs or waits, so the pass may use every core and end sooner. `prefix`: see `PackedBatch`.
    """

    encodings: Sequence[Encoding]
    rows: Sequence[Sequence[CallerPlace]]
    taken_ns: int
    positions: Positions
    kind: LaneKind = LaneKind.BULK
    use_all_cores: bool = False
    prefix: int = 0

    @cached_property
    def packed(self) -> PackedBatch:
        """As a backend takes it. Made when first asked for: call it without the device's lock."""
        heads = frozenset[Head]().union(*(request.heads for request, _ in self.callers))
        return pack(self.encodings, heads, self.positions, self.prefix)

    @cached_property
    def tokens(self) -> int:
        """Of all its sequences."""
        return sum(map(len, self.encodings))

    @property
    def callers(self) -> list[tuple[EngineRequest, int]]:
        """Return (request, place in it) for each sequence of the batch and each request that waits for it."""
        return [caller for callers in self.rows for caller in callers]

    def split(self, outputs: HeadOutputs) -> list[Part]:
        """Return each request's share of the outputs. Copies, so call it without the device's lock."""
        rows_of: dict[EngineRequest, tuple[list[int], list[int]]] = {}
        for row, callers in enumerate(self.rows):
            for request, place in callers:
                rows, places = rows_of.setdefault(request, ([], []))
                rows.append(row)
                places.append(place)
        return [
            Part(
                request,
                places,
                outputs if len(rows_of) == 1 and rows == list(range(len(self.rows))) else _share(outputs, request, rows),
            )
            for request, (rows, places) in rows_of.items()
        ]


def _share(outputs: HeadOutputs, request: EngineRequest, rows: list[int]) -> HeadOutputs:
    return outputs.only(request.heads).take(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The outputs of one batch for one request: of its sequences at `places`."""

    request: EngineRequest
    places: list[int]
    outputs: HeadOutputs


class EngineCore:
    """The queues of one model. Not thread-safe: its users share a lock.

    `lanes`: the kind of each lane that calls `take`; where some are express, short requests are kept for those.
    `shared_tokens`: see `shared_tokens`; 0 where no prefix is computed once. Sequences with one go with each other only, and
    what counts of them against `max_tokens` is what they have beyond it.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        positions: Positions,
        max_sequences: int | None = None,
        padding: Padding = Padding.NONE,
        lanes: Sequence[LaneKind] = (LaneKind.BULK,),
        cache: ResultCache | None = None,
        shared_tokens: int = 0,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._padding = padding
        self._positions = positions
        self._cache = cache
        self._look_ahead = max(LOOK_AHEAD, max_tokens // SHORT_TOKENS)
        self._shared_tokens = shared_tokens
        both = {LaneKind.EXPRESS: OVERTAKEN - OVERTAKEN_BY_BULK, LaneKind.BULK: OVERTAKEN_BY_BULK}
        arrivals = Arrivals(both if LaneKind.EXPRESS in lanes else {LaneKind.BULK: OVERTAKEN})
        self._bulk = FairQueue(LaneKind.BULK, arrivals)
        self._express = FairQueue(LaneKind.EXPRESS, arrivals) if LaneKind.EXPRESS in lanes else None
        self._lanes = Counter(lanes)
        self._running = 0  # batches that lanes have taken and not given back
        self._parts_left = self._part_tokens = 0

    def __len__(self) -> int:
        """Sequences waiting, those of cancelled requests included until their turn comes."""
        return len(self._bulk) + (0 if self._express is None else len(self._express))

    @property
    def shared(self) -> int:
        """How many sequences, ever, were identical to one that waited already."""
        return self._bulk.shared + (0 if self._express is None else self._express.shared)

    @property
    def waiting_tokens(self) -> int:
        return self._bulk.tokens + (0 if self._express is None else self._express.tokens)

    @property
    def running(self) -> int:
        """Batches that lanes have taken and not given back."""
        return self._running

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    @property
    def is_one_pass(self) -> bool:
        """Whether bulk lanes would not share what waits for them, on an idle device."""
        lengths = [len(waiting) for waiting in self._bulk.head(self._look_ahead)]
        waiting_tokens = self._bulk.tokens
        return share(lengths, waiting_tokens, self._lanes[LaneKind.BULK], self._max_tokens, idle=True) >= waiting_tokens

    def waiting(self, kind: LaneKind) -> int:
        """How many sequences wait for lanes of a kind."""
        return len(self._queue_of(kind))

    def add(self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int = 0) -> EngineRequest:
        """Queue the sequences of one request. It is done at once if the cache holds all of them."""
        request = EngineRequest(encodings, heads, now_ns)
        if request.done:
            return request
        places = self._unknown(request) if self._cache is not None else range(len(encodings))
        if places:
            tokens = sum(len(encodings[place]) for place in places)
            kind = LaneKind.BULK if self._express is None else lane_for(tokens, self._express.tokens)
            self._queue_of(kind).add(request, places, encodings)
        return request

    def take(self, now_ns: int = 0, kind: LaneKind = LaneKind.BULK, *, device_idle: bool = True) -> Batch | None:
        """Return the next batch for a lane of a kind, or None: nothing waits for it, or lanes of another kind are to take first
        what has been overtaken enough. Sequences of cancelled requests are dropped.

        `device_idle`: no other model of the device runs a batch or has one waiting.
        """
        queue = self._queue_of(kind)
        head = queue.head(self._look_ahead)
        if not head:
            return None
        alike, prefix = self._alike(head)
        lengths = [len(waiting) - prefix for waiting in alike]
        waiting_tokens = queue.tokens - prefix * len(alike)
        idle = device_idle and self._running == 0 and self.waiting_tokens == queue.tokens
        budget = share(lengths, waiting_tokens, self._lanes[kind], self._max_tokens, idle=idle)
        if idle:  # what waits is one burst: the other lanes take parts as large as this one
            self._parts_left, self._part_tokens = self._lanes[kind] - 1, budget
        elif self._parts_left:
            self._parts_left -= 1
            budget = max(budget, self._part_tokens)
        if prefix and sum(lengths) <= budget + prefix:  # another pass for the rest would compute the prefix again
            budget = sum(lengths)
        chosen = self._choose(queue, head, budget)
        if not chosen:
            return None
        queue.remove(chosen)
        batch = self._batch(chosen, now_ns, kind, use_all_cores=idle and not len(self))
        self._running += 1
        return batch

    def give(self, batch: Batch, parts: Sequence[Part], now_ns: int = 0) -> list[EngineRequest]:
        """Give `parts`, made by `Batch.split`, to their requests; return those that are complete now."""
        self._running -= 1
        for part in parts:
            part.request.keep(part.places, part.outputs)
            part.request.inference_ns += (now_ns - batch.taken_ns) * len(part.places)
            if self._cache is not None:
                self._remember(self._cache, part)
        return [part.request for part in parts if part.request.done]

    def fail(self, batch: Batch, error: BaseException) -> list[EngineRequest]:
        """Fail the requests of a batch and return them."""
        self._running -= 1
        return _failed([request for request, _ in batch.callers], error)

    def fail_all(self, error: BaseException) -> list[EngineRequest]:
        """Fail every waiting request, empty the queues, and return the requests."""
        waiting = [waiting for queue in self._queues() for waiting in queue.clear()]
        return _failed([request for one in waiting for request, _ in one.callers], error)

    def _queues(self) -> list[FairQueue]:
        return [self._bulk] if self._express is None else [self._express, self._bulk]

    def _queue_of(self, kind: LaneKind) -> FairQueue:
        return self._bulk if self._express is None or kind is LaneKind.BULK else self._express

    def _choose(self, queue: FairQueue, head: Sequence[Waiting], budget: int) -> Sequence[Waiting]:
        """Return the next sequences by tags; or, where a request has been overtaken enough for that, those that came first, as
        far as they may be taken."""
        chosen = self._fitting(head, budget)
        allowed = queue.allowed(chosen)
        if len(allowed) == len(chosen):
            return chosen
        return queue.allowed(self._fitting(queue.first_come(budget), budget))

    def _fitting(self, order: Sequence[Waiting], budget: int) -> Sequence[Waiting]:
        alike, prefix = self._alike(order)
        places = choose(
            [len(waiting) - prefix for waiting in alike],
            max_tokens=budget,
            max_sequences=self._max_sequences,
            padding=self._padding,
            prefix=prefix,
            shared_tokens=self._shared_tokens,
        )
        return [alike[place] for place in places]

    def _alike(self, order: Sequence[Waiting]) -> tuple[Sequence[Waiting], int]:
        """Return what may run with the first, which shares its prefix or has none as it has, and the tokens of that prefix."""
        if not (self._shared_tokens and order):
            return order, 0
        prefix = order[0].encoding.prefix
        return [waiting for waiting in order if waiting.encoding.prefix == prefix], order[0].encoding.shared

    def _batch(self, chosen: Sequence[Waiting], now_ns: int, kind: LaneKind, *, use_all_cores: bool) -> Batch:
        encodings, rows = [waiting.encoding for waiting in chosen], [waiting.callers for waiting in chosen]
        prefix = encodings[0].shared if self._shared_tokens else 0
        batch = Batch(encodings, rows, now_ns, self._positions, kind, use_all_cores, prefix)
        for request, _ in batch.callers:
            request.queue_ns += now_ns - request.added_ns
        return batch

    def _unknown(self, request: EngineRequest) -> list[int]:
        """Return the places of the sequences to compute; the request gets the outputs of the others from the cache."""
        assert self._cache is not None
        unknown = []
        for place, encoding in enumerate(request.encodings):
            outputs = self._cache.find(encoding, request.heads)
            if outputs is None:
                unknown.append(place)
            else:
                request.keep([place], outputs)
        return unknown

    def _remember(self, cache: ResultCache, part: Part) -> None:
        for row, place in enumerate(part.places):
            cache.keep(part.request.encodings[place], part.request.heads, part.outputs.only(part.request.heads).take([row]))


def _failed(requests: Sequence[EngineRequest], error: BaseException) -> list[EngineRequest]:
    failed = list(dict.fromkeys(requests))
    for request in failed:
        request.error = error
    return failed
