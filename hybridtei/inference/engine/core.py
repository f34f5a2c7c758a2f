"""The queue: sequences of many requests -> batches, and outputs -> their requests; and the cache of
outputs. It has no threads and no clock.

If the backend has express lanes, short requests have their own queue. Each queue is fair by itself.
Later work overtakes a request, in either queue, by at most `scheduler.OVERTAKEN` times its tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hybridtei.batch import Encoding, Head, PackedBatch, Padding, Positions, pack
from hybridtei.inference.engine.scheduler import (
    OVERTAKEN,
    OVERTAKEN_BY_BULK,
    Arrivals,
    CallerPlace,
    EngineRequest,
    FairQueue,
    Waiting,
    choose,
    lane_for,
    share,
)
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind

if TYPE_CHECKING:
    from hybridtei.config import EngineConfig
    from hybridtei.inference.backends.base import Backend

# The least number of waiting sequences that one choice considers
LOOK_AHEAD = 512
# A choice considers as many texts of this length as fill a pass; a GPU's default permits allow them
SHORT_TOKENS = 16
# Tokens of a batch with a common prefix, counted for each sequence: attention reads it for each
MAX_SHARED_TOKENS = 8192


def shared_tokens(backend: Backend, config: EngineConfig) -> int:
    """Return the bound of tokens in a batch with a shared prefix, counting the prefix for each
    sequence."""
    return min(MAX_SHARED_TOKENS, config.max_batch_tokens) if backend.shares_prefixes else 0


@dataclass(frozen=True, eq=False)
class EngineBatch:
    """The sequences of a pass, their callers, and the lane of their queue.

    `use_all_cores`: no other batch runs or waits, so the pass may use every core. `prefix`: as in
    `PackedBatch`.
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
        """The packed batch for a backend, made at the first access. Do not hold the device's
        lock."""
        heads = frozenset[Head]()
        for callers in self.rows:
            for request, _ in callers:
                heads |= request.heads
        return pack(self.encodings, heads, self.positions, self.prefix)

    @cached_property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum([len(encoding.input_ids) for encoding in self.encodings])

    @property
    def callers(self) -> list[tuple[EngineRequest, int]]:
        """Return (request, place in it) for each sequence of the batch and each request waiting for
        it."""
        return [caller for callers in self.rows for caller in callers]

    def split(self, outputs: HeadOutputs) -> list[Part]:
        """Return each request's part of the outputs. It copies, so do not hold the device's
        lock."""
        if len(self.rows) == 1 and len(self.rows[0]) == 1:
            request, place = self.rows[0][0]
            return [Part(request, [place], outputs)]
        rows_of: dict[EngineRequest, tuple[list[int], list[int]]] = {}
        for row, callers in enumerate(self.rows):
            for request, place in callers:
                rows, places = rows_of.setdefault(request, ([], []))
                rows.append(row)
                places.append(place)
        if len(rows_of) == 1:
            ((request, (rows, places)),) = rows_of.items()
            if rows == list(range(len(self.rows))):
                return [Part(request, places, outputs)]
        return [
            Part(request, places, outputs.only(request.heads).take(rows))
            for request, (rows, places) in rows_of.items()
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One batch's outputs for one request: for its sequences at `places`."""

    request: EngineRequest
    places: list[int]
    outputs: HeadOutputs


# Bytes of an entry's Python objects besides its arrays
ENTRY_BYTES = 600


class ResultCache:
    """Outputs of sequences within a bound of bytes. The least recently used are evicted first. Not
    thread-safe.

    A text that is requested with further outputs is computed again, and stored with these.
    """

    def __init__(self, max_bytes: int) -> None:
        self.hits = self.misses = self.bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[frozenset[Head], HeadOutputs, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, encoding: Encoding, heads: frozenset[Head]) -> HeadOutputs | None:
        """Return the outputs of `heads` for these ids, or None if one is missing."""
        entry = self._entries.get(encoding.key)
        if entry is None or not heads <= entry[0]:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(encoding.key)
        return entry[1].only(heads)

    def keep(self, encoding: Encoding, heads: frozenset[Head], row: HeadOutputs) -> None:
        """Store one sequence's outputs, unless they alone exceed the bound."""
        size = row.nbytes + len(encoding.key) + ENTRY_BYTES
        if size > self._max_bytes:
            return
        self._drop(encoding.key)
        self._entries[encoding.key] = (heads, row, size)
        self.bytes += size
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[2]


class EngineCore:
    """The queues of one model. Not thread-safe: callers share a lock.

    `lanes`: the kind of each lane that calls `take`. If some are express, short requests are for
    these. `shared_tokens`: from the function of that name; 0 if the backend computes no prefix
    once. Only sequences with the same prefix share a batch; their tokens after the prefix count
    against `max_tokens`.
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
        self.max_tokens = max_tokens
        # Batches that lanes have taken and not given back
        self.running = 0
        self._max_sequences = max_sequences
        self._padding = padding
        self._positions = positions
        self._cache = cache
        self._look_ahead = max(LOOK_AHEAD, max_tokens // SHORT_TOKENS)
        self._shared_tokens = shared_tokens
        both = {LaneKind.EXPRESS: OVERTAKEN - OVERTAKEN_BY_BULK, LaneKind.BULK: OVERTAKEN_BY_BULK}
        overtaken = both if LaneKind.EXPRESS in lanes else {LaneKind.BULK: OVERTAKEN}
        arrivals = Arrivals(overtaken)
        self._queues = {kind: FairQueue(kind, arrivals) for kind in overtaken}
        # Without express lanes, all work is bulk
        self._queue_of = {
            kind: self._queues.get(kind, self._queues[LaneKind.BULK]) for kind in LaneKind
        }
        self._lanes = Counter(lanes)
        self._parts_left = self._part_tokens = 0

    def __len__(self) -> int:
        """The number of waiting sequences. Those of cancelled requests count until their turn."""
        return sum(map(len, self._queues.values()))

    @property
    def shared(self) -> int:
        """The count of sequences so far that were identical to a waiting one."""
        return sum(queue.shared for queue in self._queues.values())

    @property
    def waiting_tokens(self) -> int:
        tokens = 0
        for queue in self._queues.values():
            tokens += queue.tokens
        return tokens

    @property
    def is_one_pass(self) -> bool:
        """True if, on an idle device, one pass takes all work that waits for bulk lanes."""
        bulk = self._queues[LaneKind.BULK]
        lengths = [waiting.tokens for waiting in bulk.head(self._look_ahead)]
        return (
            share(lengths, bulk.tokens, self._lanes[LaneKind.BULK], self.max_tokens, idle=True)
            >= bulk.tokens
        )

    def waiting(self, kind: LaneKind) -> int:
        """The number of sequences that wait for lanes of one kind."""
        return len(self._queue_of[kind].order)

    def add(
        self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int = 0
    ) -> EngineRequest:
        """Queue the sequences of one request. If the cache has all of them, the request is complete
        at once."""
        request = EngineRequest(encodings, heads, now_ns)
        if request.done:
            return request
        places = self._unknown(request) if self._cache is not None else range(len(encodings))
        if places:
            tokens = 0
            for place in places:
                tokens += len(encodings[place].input_ids)
            kind = lane_for(tokens, self._queue_of[LaneKind.EXPRESS].tokens)
            self._queue_of[kind].add(request, places, encodings, tokens)
        return request

    def take(
        self, now_ns: int = 0, kind: LaneKind = LaneKind.BULK, *, device_idle: bool = True
    ) -> EngineBatch | None:
        """Return the next batch for a lane of one kind, or None if nothing waits for it, or lanes
        of another kind must first take work that was overtaken enough. Drops sequences of cancelled
        requests.

        `device_idle`: no other model of the device has a running or waiting batch.
        """
        queue = self._queue_of[kind]
        head = queue.head(self._look_ahead)
        if not head:
            return None
        alike, prefix = self._alike(head) if self._shared_tokens else (head, 0)
        lengths = [waiting.tokens - prefix for waiting in alike]
        waiting_tokens = queue.tokens - prefix * len(alike)
        idle = device_idle and self.running == 0 and self.waiting_tokens == queue.tokens
        lanes = self._lanes[kind]
        joins = not idle and self._parts_left > 0
        budget = share(
            lengths,
            waiting_tokens,
            lanes,
            self.max_tokens,
            idle=idle,
            burst=self._part_tokens if joins else 0,
            prefix=prefix,
        )
        if idle:
            # All waiting work is one burst: the other lanes take parts of the same size
            self._parts_left = lanes - 1
            self._part_tokens = budget
        elif joins:
            self._parts_left -= 1
        chosen = self._choose(queue, head, budget)
        if not chosen:
            return None
        is_last = queue.remove(chosen)
        batch = self._batch(chosen, now_ns, kind, use_all_cores=idle and is_last)
        self.running += 1
        return batch

    def give(
        self, batch: EngineBatch, parts: Sequence[Part], now_ns: int = 0
    ) -> list[EngineRequest]:
        """Give `parts`, from `EngineBatch.split`, to their requests. Return the now complete
        requests."""
        self.running -= 1
        for part in parts:
            part.request.keep(part.places, part.outputs)
            part.request.inference_ns += (now_ns - batch.taken_ns) * len(part.places)
            if self._cache is not None:
                self._remember(self._cache, part)
        return [part.request for part in parts if part.request.done]

    def fail(self, batch: EngineBatch, error: BaseException) -> list[EngineRequest]:
        """Fail the requests of a batch. Return them."""
        self.running -= 1
        return _failed([request for request, _ in batch.callers], error)

    def fail_all(self, error: BaseException) -> list[EngineRequest]:
        """Fail every waiting request, empty the queues, and return the requests."""
        waiting = [waiting for queue in self._queues.values() for waiting in queue.clear()]
        return _failed([request for work in waiting for request, _ in work.callers], error)

    def _choose(self, queue: FairQueue, head: Sequence[Waiting], budget: int) -> Sequence[Waiting]:
        """Return the next sequences by tags; if a request has been overtaken enough, only the
        allowed ones, in order of arrival."""
        chosen = head if len(head) == 1 else self._fitting(head, budget)
        allowed = queue.allowed(chosen)
        if len(allowed) == len(chosen):
            return chosen
        return queue.allowed(self._fitting(queue.first_come(budget), budget))

    def _fitting(self, order: Sequence[Waiting], budget: int) -> Sequence[Waiting]:
        alike, prefix = self._alike(order) if self._shared_tokens else (order, 0)
        places = choose(
            [waiting.tokens - prefix for waiting in alike],
            max_tokens=budget,
            max_sequences=self._max_sequences,
            padding=self._padding,
            prefix=prefix,
            shared_tokens=self._shared_tokens,
        )
        return [alike[place] for place in places]

    def _alike(self, order: Sequence[Waiting]) -> tuple[Sequence[Waiting], int]:
        """Return the sequences that share the first one's prefix (or, like it, have none), and the
        prefix's tokens."""
        if not order:
            return order, 0
        first = order[0].encoding
        prefix = first.prefix
        return [waiting for waiting in order if waiting.encoding.prefix == prefix], first.shared

    def _batch(
        self, chosen: Sequence[Waiting], now_ns: int, kind: LaneKind, *, use_all_cores: bool
    ) -> EngineBatch:
        encodings = [waiting.encoding for waiting in chosen]
        rows = [waiting.callers for waiting in chosen]
        prefix = encodings[0].shared if self._shared_tokens else 0
        batch = EngineBatch(encodings, rows, now_ns, self._positions, kind, use_all_cores, prefix)
        for callers in rows:
            for request, _ in callers:
                request.queue_ns += now_ns - request.added_ns
        return batch

    def _unknown(self, request: EngineRequest) -> list[int]:
        """Return the places of the sequences to compute. The request gets the other outputs from
        the cache."""
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
            cache.keep(
                part.request.encodings[place],
                part.request.heads,
                part.outputs.only(part.request.heads).take([row]),
            )


def _failed(requests: Sequence[EngineRequest], error: BaseException) -> list[EngineRequest]:
    failed = list(dict.fromkeys(requests))
    for request in failed:
        request.error = error
    return failed
