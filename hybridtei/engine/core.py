"""The queue: sequences of many requests in, batches out, outputs back to their requests. Knows no thread and no clock.

Fair, not blind. Every sequence has a tag: the request's share of virtual time, which grows with each token it asks for, and
the lowest tag rides first. So a request's thousandth text waits behind someone's five-token query, and nothing starves, as
virtual time moves on with what is served (start-time fair queueing, Goyal et al. 1996).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hybridtei.batch import Encoding, Head, PackedBatch, Positions, pack
from hybridtei.engine.scheduler import choose
from hybridtei.outputs import HeadOutputs, Timings

LOOK_AHEAD = 512  # waiting sequences that one choice considers


@dataclass(eq=False, slots=True)
class Ticket:
    """One request inside the engine: its sequences, and what has come back for them so far."""

    encodings: Sequence[Encoding]
    heads: frozenset[Head]
    added_ns: int
    cancelled: bool = False
    error: BaseException | None = None
    queue_ns: int = 0
    inference_ns: int = 0
    _parts: list[tuple[list[int], HeadOutputs]] = field(default_factory=list)
    _missing: int = 0

    def __post_init__(self) -> None:
        self._missing = len(self.encodings)

    @property
    def done(self) -> bool:
        return self._missing == 0 or self.error is not None

    def keep(self, places: list[int], outputs: HeadOutputs) -> None:
        """Take in the outputs of some of its sequences."""
        self._parts.append((places, outputs))
        self._missing -= len(places)

    def outputs(self) -> HeadOutputs:
        """Outputs of all sequences, in the request's order. Raises the error that a failed batch left."""
        if self.error is not None:
            raise self.error
        places = [place for part, _ in self._parts for place in part]
        joined = HeadOutputs.concat([outputs for _, outputs in self._parts])
        if places == list(range(len(places))):
            return joined
        return joined.take(sorted(range(len(places)), key=places.__getitem__))

    def timings(self) -> Timings:
        """Means over its sequences."""
        n = max(len(self.encodings), 1)
        return Timings(queue_ns=self.queue_ns // n, inference_ns=self.inference_ns // n)


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    tag: int
    number: int  # arrival, so that equal tags keep their order
    ticket: Ticket = field(compare=False)
    place: int = field(compare=False)

    def __len__(self) -> int:
        return len(self.ticket.encodings[self.place])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A packed batch and whose sequences ride in it, in its order."""

    packed: PackedBatch
    riders: Sequence[tuple[Ticket, int]]
    taken_ns: int

    def split(self, outputs: HeadOutputs) -> list[Part]:
        """Each request's share of the outputs. Copies, so do it where nobody waits for a lock."""
        rows_of: dict[Ticket, list[int]] = {}
        for row, (ticket, _) in enumerate(self.riders):
            rows_of.setdefault(ticket, []).append(row)
        return [
            Part(
                ticket,
                [self.riders[row][1] for row in rows],
                (outputs if len(rows) == len(self.riders) else outputs.only(ticket.heads).take(rows)),
            )
            for ticket, rows in rows_of.items()
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one batch brought for one request: outputs of its sequences at `places`."""

    ticket: Ticket
    places: list[int]
    outputs: HeadOutputs


class EngineCore:
    """Not thread-safe: whoever shares one holds a lock around it."""

    def __init__(
        self, *, max_tokens: int, positions: Positions, max_sequences: int | None = None, padded: bool = False
    ) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._padded = padded
        self._positions = positions
        self._queue: list[_Waiting] = []
        self._virtual_time = 0
        self._arrivals = 0

    def __len__(self) -> int:
        """Sequences waiting, those of cancelled requests included until their turn comes."""
        return len(self._queue)

    def add(self, encodings: Sequence[Encoding], heads: frozenset[Head], now_ns: int = 0) -> Ticket:
        """Queue the sequences of one request."""
        ticket = Ticket(encodings, heads, now_ns)
        tags = accumulate((len(encoding) for encoding in encodings), initial=self._virtual_time)
        next(tags)
        for place, tag in enumerate(tags):
            insort(self._queue, _Waiting(tag, self._arrivals, ticket, place))
            self._arrivals += 1
        return ticket

    def take(self, now_ns: int = 0) -> Batch | None:
        """The next batch, or None if nobody waits. Sequences of requests that were cancelled or failed are dropped."""
        head = self._next_live()
        if not head:
            return None
        lengths = [len(waiting) for waiting in head]
        chosen = choose(lengths, max_tokens=self._max_tokens, max_sequences=self._max_sequences, padded=self._padded)
        riding = [head[i] for i in chosen]
        taken = set(chosen)
        self._queue[: len(head)] = [waiting for i, waiting in enumerate(head) if i not in taken]
        self._virtual_time = max(self._virtual_time, riding[0].tag)
        return self._batch(riding, now_ns)

    def give(self, batch: Batch, outputs: HeadOutputs, now_ns: int = 0) -> list[Ticket]:
        """Hand a batch's outputs back; the requests that are complete now."""
        return self.settle(batch.split(outputs), now_ns - batch.taken_ns)

    def settle(self, parts: Sequence[Part], took_ns: int = 0) -> list[Ticket]:
        """`give` in two steps: what `Batch.split` made goes to its requests; those that are complete now."""
        for part in parts:
            part.ticket.keep(part.places, part.outputs)
            part.ticket.inference_ns += took_ns * len(part.places)
        return [part.ticket for part in parts if part.ticket.done]

    def fail(self, batch: Batch, error: BaseException) -> list[Ticket]:
        """Mark the requests that rode in a batch as failed; others are untouched."""
        failed = list(dict.fromkeys(ticket for ticket, _ in batch.riders))
        for ticket in failed:
            ticket.error = error
        return failed

    def fail_all(self, error: BaseException) -> list[Ticket]:
        """Fail every waiting request and empty the queue."""
        waiting = list(dict.fromkeys(waiting.ticket for waiting in self._queue))
        for ticket in waiting:
            ticket.error = error
        self._queue.clear()
        return waiting

    def _next_live(self) -> list[_Waiting]:
        """The first LOOK_AHEAD of the queue, after the dead among them were removed."""
        while True:
            head = self._queue[:LOOK_AHEAD]
            live = [waiting for waiting in head if not (waiting.ticket.cancelled or waiting.ticket.done)]
            if len(live) == len(head):
                return live
            self._queue[: len(head)] = live

    def _batch(self, riding: Sequence[_Waiting], now_ns: int) -> Batch:
        heads = frozenset[Head]().union(*(waiting.ticket.heads for waiting in riding))
        for waiting in riding:
            waiting.ticket.queue_ns += now_ns - waiting.ticket.added_ns
        packed = pack([waiting.ticket.encodings[waiting.place] for waiting in riding], heads, self._positions)
        return Batch(packed, [(waiting.ticket, waiting.place) for waiting in riding], now_ns)
