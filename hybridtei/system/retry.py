"""When to try again: growing pauses, those that the other side asks for, and an end to all waiting."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Retries:
    """Counts the tries of one call from its first on. `patience_s`: after so long no further try is begun.

    Pauses double from `first_s` to `longest_s`, each cut by up to half at random; one that is asked for is kept in full, or not
    begun if it would outlast the patience.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.tries = 0
        self._patience_s, self._first_s, self._longest_s = patience_s, first_s, longest_s
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
        pause_s: float = min(self._first_s * 2 ** min(self.tries - 1, 20), self._longest_s)
        return min(pause_s * (1 - self._jitter() / 2), left_s)
