"""How large a pass may be: memory measured on two sizes, drawn on as a line, and tried before it is believed.

What a pass needs grows with its tokens; what a sequence needs beyond that (masks of plain attention) is met by measuring with
the longest. Knows no torch: the measuring is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hybridtei.batch import Encoding, PackedBatch, pack
from hybridtei.errors import LoadError

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

FIRST_TOKENS = 2048
SHORT_TOKENS = 8  # sequences so short are the most that a pass can hold: what is computed a sequence counts then
CAUTION = 0.9  # of what the line promises, since memory is cut into pieces
MIN_GAIN = 1.05  # a size that is nearer to the one known to fit is not worth another pass

Peak = Callable[[int], int | None]


@runtime_checkable
class Measured(Protocol):
    """A backend whose passes are bounded by memory of its own."""

    def most_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int: ...


def most_tokens(peak: Peak, *, limit: int, longest: int, allowed: int) -> int:
    """Tokens of the largest pass whose peak stays within `allowed` bytes: at least `longest`, at most `limit`.

    `peak`: bytes that a pass of so many tokens takes, or None if it failed for want of memory. Raises LoadError if a pass of
    `longest` tokens does.
    """
    smallest = peak(longest)
    if smallest is None or smallest > allowed:
        raise LoadError(f"an input of {longest} tokens does not fit into the memory that is free: lower `max-batch-tokens`")
    points = [(longest, smallest)]
    size = min(limit, max(2 * longest, FIRST_TOKENS))
    while size > MIN_GAIN * points[-1][0]:
        taken = peak(size)
        if taken is None or taken > allowed:
            size = (size + points[-1][0]) // 2
            continue
        points.append((size, taken))
        size = min(limit, estimate(points, allowed))
    return max(points)[0]


def estimate(points: Sequence[tuple[int, int]], allowed: int) -> int:
    """Tokens that fit by the line through the last two of (tokens, bytes), ascending; twice the last where it does not rise."""
    (fewer, less), (more, most) = points[-2:]
    slope = (most - less) / (more - fewer)
    if slope <= 0:
        return 2 * more
    return int(more + CAUTION * (allowed - most) / slope)


def worst_batches(spec: ModelSpec, tokens: int, longest: int) -> list[PackedBatch]:
    """Passes of so many tokens that need the most: of the longest sequences, and of as many as there can be; with all heads."""
    return [_batch(spec, tokens, length) for length in dict.fromkeys((min(longest, tokens), min(SHORT_TOKENS, longest)))]


def _batch(spec: ModelSpec, tokens: int, length: int) -> PackedBatch:
    first = spec.positions.offset
    ids = np.arange(first, first + tokens, dtype=np.int64) % spec.vocab_size
    cuts = [*range(length, tokens, length)]
    return pack([Encoding(piece) for piece in np.split(ids, cuts)], spec.heads, spec.positions)
