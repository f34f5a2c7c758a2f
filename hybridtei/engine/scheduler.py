"""Which lane a request waits for, and who rides the next forward pass: pure functions of lengths, budgets and ages.

Where nothing is padded, arrival order is kept and gaps are filled with what still fits. Where something is, like lengths ride
together with the one whose turn it is: in a rectangle a batch costs `sequences * longest`, and where only attention has one,
as much less as attention costs less than everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridtei.batch import Padding
from hybridtei.system.cpu import LaneKind

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
    """Places in `waiting` (lengths in tokens, whose turn it is first) of those who ride, ascending.

    At least the first rides if any wait, however long it is, so the queue moves. Same queue in, same batch out.
    """
    if not waiting:
        return []
    order = range(len(waiting))
    by_likeness = sorted(order, key=lambda i: abs(waiting[i] - waiting[0])) if padding is not Padding.NONE else order
    riders, useful, longest = [0], waiting[0], waiting[0]
    for i in by_likeness:
        if i == 0:
            continue
        if max_sequences is not None and len(riders) >= max_sequences:
            break
        if padding is Padding.NONE and useful >= max_tokens:
            break
        tall = max(longest, waiting[i])
        cost = price(useful + waiting[i], len(riders) + 1, tall, padding)
        if cost > max_tokens or (padding in ALLOWED and cost > ALLOWED[padding] * (useful + waiting[i])):
            continue
        riders.append(i)
        useful, longest = useful + waiting[i], tall
    return sorted(riders)
