"""Retries of a call: growing pauses, or the pauses that the server asks for, within a total bound.

A pause from Retry-After counts against the same bound. Qdrant's own client would sleep without one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from hybridtei.errors import StoreUnavailable

T = TypeVar("T")
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Retries:
    """Counts the tries of one call. No try begins later than `patience_s` after the first.

    Pauses double, each shortened at random by up to half. A pause that the server asks for is kept
    in full, unless it is below the first one; if it would exceed `patience_s`, there is no further
    try.
    """

    def __init__(self, patience_s: float) -> None:
        self.tries = 0
        self._patience_s = patience_s
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first try."""
        return time.monotonic() - self._began_s

    def pause_s(self, asked_s: float | None = None) -> float | None:
        """After a failed try: the seconds until the next one; None: give up. `asked_s`: the pause
        that the server asks for."""
        self.tries += 1
        left_s = self._patience_s - self.elapsed_s
        if left_s <= 0 or (asked_s is not None and asked_s > left_s):
            return None
        if asked_s is not None and asked_s >= FIRST_PAUSE_S:
            return asked_s
        pause_s: float = min(FIRST_PAUSE_S * 2 ** min(self.tries - 1, 20), LONGEST_PAUSE_S)
        if asked_s is None:
            pause_s *= 1 - random.random() / 2
        return min(pause_s, left_s)


async def retry_unavailable(attempt: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Call `attempt`, and retry it after StoreUnavailable until `patience_s` after the first try.

    `Retries` gives the pauses. Raises the last StoreUnavailable, with the number of tries, and
    other errors at once.
    """
    retries = Retries(patience_s)
    while True:
        try:
            return await attempt()
        except StoreUnavailable as error:
            # The store has retried the call itself, with the user's patience
            if error.is_counted:
                raise
            pause_s = retries.pause_s(error.retry_after_s)
            if pause_s is None:
                count = "once" if retries.tries == 1 else f"{retries.tries} times"
                message = (
                    f"{error} (tried {count} in {retries.elapsed_s:.1f} s, patience {patience_s:g} "
                    "s)"
                )
                raise StoreUnavailable(message, error.retry_after_s, is_counted=True) from error
        await asyncio.sleep(pause_s)


def retry_after_s(headers: Any) -> float | None:
    """The seconds of a Retry-After header, which has seconds or a date."""
    text = headers.get("Retry-After") if headers is not None else None
    if not text:
        return None
    try:
        # With 0.0 as the first argument, NaN becomes 0
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
