"""The way into a Ray cluster: one that runs, or one of our own on this machine for as long as it is needed.

The surprise: `ray.init()` without an address joins whatever cluster was last started on the machine, whoever did so. Here that
takes an address, or RAY_ADDRESS.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from importlib.util import find_spec
from math import ceil
from typing import Any

from hybridtei.errors import LoadError
from hybridtei.system.cpu import GRANTED

LOCAL = "local"
REACH_S = 10.0


def require() -> None:
    """Raises LoadError, which names the extra, where Ray is not installed."""
    if find_spec("ray") is None:
        raise LoadError("the package `ray` is missing: pip install 'hybridtei[ray]'")


def join(address: str | None, processors: int) -> Callable[[], None]:
    """Join a cluster, or start one of so many processors; what is returned leaves it again. Call it from the main thread.

    `address`: None takes RAY_ADDRESS, and without that a cluster of our own. One that was joined before is left as it is.
    Raises LoadError without Ray, ConnectionError where nothing answers.
    """
    require()
    import ray

    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    _reach(address)
    own: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, job_config=_isolated(), log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error
    leave: Callable[[], None] = ray.shutdown
    return leave


def _isolated() -> Any:
    """Settings of a job whose processes do not search the driver's working folder for modules, before all others at that.

    Ray leaves it out for jobs of its client only, and has no public word for that.
    """
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


def _reach(address: str) -> None:
    """Ray itself would try for minutes, and then end the process. Addresses without a port are left to it."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"Ray at {address}: {error}") from error


def keep_to(processors: int) -> None:
    """Let this process compute with so many threads: Ray counts processors and fences none."""
    from threadpoolctl import threadpool_limits

    os.environ[GRANTED] = str(processors)
    os.environ["RAYON_NUM_THREADS"] = str(processors)  # the tokenizer's
    threadpool_limits(limits=processors)


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
