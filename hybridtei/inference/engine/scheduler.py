"""Requests, the choice of the sequences that run next, and the cache of outputs.

`choose` and `lane_for` are functions of lengths, budgets and ages. Without padding, sequences keep the order of arrival, and
smaller ones fill gaps. With padding, sequences of similar length join the first: a padded batch costs `sequences * longest`,
and if only attention is padded, the same share of attention's cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hybridtei.batch import Encoding, Head, Ids, Padding
from hybridtei.outputs import HeadOutputs, Timings
from hybridtei.system.machine import LaneKind

if TYPE_CHECKING:
    import asyncio


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One request from submit to join: its sequences, the outputs so far, its times, and its caller's future.

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
        self._missing = len(self.encodings) if self.heads else 0  # a request without heads needs no pass

    @property
    def done(self) -> bool:
        return self._missing == 0 or self.error is not None

    def wake(self, error: BaseException | None = None) -> None:
        """Resume the caller on its event loop, perhaps with `error`. No effect if it was resumed or cancelled before."""
        if self.waiter is not None and not self.waiter.done():
            self.error = error or self.error
            self.waiter.set_result(None)

    def keep(self, places: Sequence[int], outputs: HeadOutputs) -> None:
        """Add the outputs of some sequences."""
        self._parts.append((places, outputs))
        self._missing -= len(places)

    def outputs(self) -> HeadOutputs:
        """Return the outputs of all sequences, in the request's order. Raises the error of a failed batch."""
        if self.error is not None:
            raise self.error
        places = [place for part, _ in self._parts for place in part]
        joined = HeadOutputs.concat([outputs for _, outputs in self._parts])
        if places == list(range(len(places))):
            return joined
        return joined.take(sorted(range(len(places)), key=places.__getitem__))

    def timings(self) -> Timings:
        """The times, as means over the sequences."""
        n = max(len(self.encodings), 1)
        return Timings(queue_ns=self.queue_ns // n, inference_ns=self.inference_ns // n)


def joined(encodings: Sequence[Encoding]) -> tuple[Ids, Ids | None, list[tuple[int, ...]]]:
    """Join encodings end to end for another process: ids int64[t], token types, and the numbers of each encoding.

    Token types None may become zeros, which mean the same.
    """
    ids, types = [one.input_ids for one in encodings], [one.token_type_ids for one in encodings]
    known = [np.zeros_like(own) if one is None else one for own, one in zip(ids, types, strict=True)]
    numbers = [(len(one), one.unseen, one.adapter, one.shared, one.route) for one in encodings]
    return np.concatenate(ids), None if all(one is None for one in types) else np.concatenate(known), [*numbers]


def apart(ids: Ids, types: Ids | None, numbers: Sequence[tuple[int, ...]]) -> list[Encoding]:
    """Split the result of `joined` into encodings that are views."""
    ends = accumulate(length for length, *_ in numbers)
    return [
        Encoding(ids[end - length : end], None if types is None else types[end - length : end], *others)
        for end, (length, *others) in zip(ends, numbers, strict=True)
    ]


EXPRESS_TOKENS = 48  # tokens of the longest express request: some milliseconds of one core
EXPRESS_BACKLOG_TOKENS = 8192  # with more waiting tokens, short requests are bulk work in small pieces
ALLOWED = {Padding.ATTENTION: 1.06, Padding.ALL: 1.25}  # bound of a batch's cost, in times its useful tokens
ATTENTION_TOKENS = 1000  # length of texts in which attention costs as much as the rest, in small models
MIN_SHARE_TOKENS = 128  # in smaller batches a core waits for weights


def lane_for(request_tokens: int, backlog_tokens: int) -> LaneKind:
    """Return the lane of a request, given the tokens that already wait for express lanes."""
    short = request_tokens <= EXPRESS_TOKENS and backlog_tokens + request_tokens <= EXPRESS_BACKLOG_TOKENS
    return LaneKind.EXPRESS if short else LaneKind.BULK


def share(lengths: Sequence[int], waiting_tokens: int, lanes: int, max_tokens: int, *, idle: bool = False) -> int:
    """Return the token budget of one batch if `lanes` share the waiting work, so that no lane takes all while another idles.

    `lengths`: of the next sequences. `idle`: nothing runs, so one pass on all cores may take everything if one sequence is
    longer than a lane's part, since a division would end no sooner.
    """
    part = -(-waiting_tokens // lanes)
    if idle and waiting_tokens <= max_tokens and max(lengths, default=0) > part:
        return max_tokens
    return min(max_tokens, max(MIN_SHARE_TOKENS, part))


def price(useful: int, sequences: int, longest: int, padding: Padding, prefix: int = 0) -> float:
    """Return the cost of a batch in tokens: useful ones and padding. `prefix`: as for `choose`."""
    if padding is Padding.NONE:
        return useful
    wasted = sequences * longest - useful
    return useful + (wasted if padding is Padding.ALL else wasted * (prefix + longest) / ATTENTION_TOKENS)


def choose(
    waiting: Sequence[int],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    padding: Padding = Padding.NONE,
    prefix: int = 0,
    shared_tokens: int = 0,
) -> list[int]:
    """Return the ascending places in `waiting` (lengths in tokens, in order of turn) of the sequences that run next.

    The first is always chosen, even if it is too long, so the queue moves. Equal queues give equal batches.

    `prefix`: the tokens before each sequence that a batch computes once. Padding may cost that much more, since another batch
    would compute the prefix again. With the prefix counted for each sequence, a batch has at most `shared_tokens` tokens.
    """
    if not waiting:
        return []
    order = range(len(waiting))
    by_length = sorted(order, key=lambda i: abs(waiting[i] - waiting[0])) if padding is not Padding.NONE else order
    chosen, useful, longest = [0], waiting[0], waiting[0]
    for i in by_length:
        if i == 0:
            continue
        if max_sequences is not None and len(chosen) >= max_sequences:
            break
        if padding is Padding.NONE and useful >= max_tokens:
            break
        tall, tokens, sequences = max(longest, waiting[i]), useful + waiting[i], len(chosen) + 1
        cost = price(tokens, sequences, tall, padding, prefix)
        too_large = tokens > max_tokens or sequences * (prefix + tall) > shared_tokens if prefix else cost > max_tokens
        if not (too_large or (padding in ALLOWED and cost > ALLOWED[padding] * tokens + prefix)):
            chosen.append(i)
            useful, longest = tokens, tall
    return sorted(chosen)


ENTRY_BYTES = 600  # bytes of an entry's Python objects besides its arrays


class ResultCache:
    """Outputs of sequences within a bound of bytes. The least recently used are evicted first. Not thread-safe.

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
