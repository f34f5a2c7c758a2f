"""A call is tried again while its store is unavailable, with growing pauses and an end to all waiting.

Knows no store. The surprise: a "try again after" answer spends the same patience as any other, where Qdrant's own client would
sleep on it for ever.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hybridtei.errors import StoreUnavailable

T = TypeVar("T")
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


async def patiently(
    attempt: Callable[[], Awaitable[T]],
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> T:
    """What the attempt gives, tried again after StoreUnavailable until `patience_s` have passed since the first try.

    Pauses double from 0.1 s to 5 s, each cut by up to half at random; one that the store asks for is kept in full, or not begun
    if it would outlast the patience. Raises the last StoreUnavailable with the number of tries; other errors as they come.
    """
    began, tries = clock(), 0
    while True:
        tries += 1
        try:
            return await attempt()
        except StoreUnavailable as error:
            left = patience_s - (clock() - began)
            asked = error.retry_after_s
            if left <= 0 or (asked is not None and asked > left):
                count = "once" if tries == 1 else f"{tries} times"
                message = f"{error} (tried {count} in {clock() - began:.1f} s, patience {patience_s:g} s)"
                raise StoreUnavailable(message, asked) from error
            pause = asked if asked is not None else min(_backoff(tries) * (1 - jitter() / 2), left)
        await sleep(pause)


def _backoff(tries: int) -> float:
    return float(min(FIRST_PAUSE_S * 2 ** min(tries - 1, 20), LONGEST_PAUSE_S))
