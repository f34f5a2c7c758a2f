"""How many replicas Ray Serve should run: as many as the tokens that wait in their engines need, and never fewer than are busy.

Serve's own policy counts requests, which says little here: one may hold five tokens or fifty thousand. The surprise: while
replicas keep up nothing waits, however busy they are, so waiting tokens alone would take replicas away in the middle of work.
"""

from __future__ import annotations

from math import ceil
from typing import Any

WAITING_TOKENS = "hybridtei_queue_tokens"  # as in /metrics


def wanted_replicas(waiting_tokens: float, requests: float, running: int, tokens_per_replica: int) -> int:
    """Replicas for so many tokens that wait in all engines, and so many requests that are inside; at least 1.

    A replica that works on a request is kept, and no request keeps more than one.
    """
    needed = ceil(waiting_tokens / tokens_per_replica)
    return max(1, needed, min(running, ceil(requests)))


class QueuedTokens:
    """A policy for Serve's `AutoscalingConfig`; it keeps to the bounds and delays that are set there."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas, nothing to remember) from Serve's `AutoscalingContext`."""
        waiting = sum((context.aggregated_metrics or {}).get(WAITING_TOKENS, {}).values())
        running = context.current_num_replicas
        return wanted_replicas(waiting, context.total_num_requests, running, self._tokens_per_replica), {}
