"""When to try a call again: growing pauses, those that the other side asks for, and an end to all waiting.

An answer with Retry-After spends the same patience as any other, where Qdrant's own client would sleep without a bound.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Retries:
    """Counts the tries of one call from its first on. `patience_s`: after so long no further try is begun.

    Pauses double, each cut by up to half at random; one that is asked for is kept in full, or not begun if it would outlast
    the patience.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.tries = 0
        self._patience_s = patience_s
        self._clock, self._jitter = clock, jitter
        self._began_s = clock()

    @property
    def elapsed_s(self) -> float:
        """Since the first try."""
        return self._clock() - self._began_s

    def pause_s(self, asked_s: float | None = None) -> float | None:
        """Seconds until the next try, after one that failed; None where there should be none. `asked_s`: by the other side."""
        self.tries += 1
        left_s = self._patience_s - self.elapsed_s
        if left_s <= 0 or (asked_s is not None and asked_s > left_s):
            return None
        if asked_s is not None:
            return asked_s
        pause_s: float = min(FIRST_PAUSE_S * 2 ** min(self.tries - 1, 20), LONGEST_PAUSE_S)
        return min(pause_s * (1 - self._jitter() / 2), left_s)


def retry_after_s(headers: Any) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date."""
    text = headers.get("Retry-After") if headers is not None else None
    if not text:
        return None
    try:
        return max(float(text), 0.0)
    except ValueError:
        pass
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
