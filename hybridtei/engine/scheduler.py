"""Who rides the next forward pass: a pure function of lengths and budgets.

Where batches are packed, arrival order is kept and gaps are filled with what still fits. Where they are padded, a batch costs
`sequences * longest`, so like lengths ride together with the one whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence

PADDING_ALLOWED = 1.25  # a padded batch may cost so many times its useful tokens


def choose(waiting: Sequence[int], *, max_tokens: int, max_sequences: int | None = None, padded: bool = False) -> list[int]:
    """Places in `waiting` (lengths in tokens, whose turn it is first) of those who ride, ascending.

    At least the first rides if any wait, however long it is, so the queue moves. Same queue in, same batch out.
    """
    if not waiting:
        return []
    order = range(len(waiting))
    by_likeness = sorted(order, key=lambda i: abs(waiting[i] - waiting[0])) if padded else order
    riders, useful, longest = [0], waiting[0], waiting[0]
    for i in by_likeness:
        if i == 0:
            continue
        if max_sequences is not None and len(riders) >= max_sequences:
            break
        if not padded and useful >= max_tokens:
            break
        tall = max(longest, waiting[i])
        cost = tall * (len(riders) + 1) if padded else useful + waiting[i]
        if cost > max_tokens or (padded and cost > PADDING_ALLOWED * (useful + waiting[i])):
            continue
        riders.append(i)
        useful, longest = useful + waiting[i], tall
    return sorted(riders)
