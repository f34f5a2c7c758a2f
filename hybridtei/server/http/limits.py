"""Bounds that have nothing to do with what a request says: of connections, and of how long its bytes take to arrive. And the
one count of everything that was refused because a bound was reached, by the name of the setting; and of connections that
nobody was at any more.

A body has to come at a thousand bytes a second, less a grace period: who sends a byte now and then would otherwise hold a
place for weeks without ever standing still.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass

from hybridtei.config import ServerConfig
from hybridtei.observability.metrics import Registry
from hybridtei.server.http.unsent import Unsent

BODY_BYTES_PER_SECOND = 1000  # and as many of an answer
UNREAD_SECONDS = 20.0  # that a client may read nothing of an answer
FILES_BESIDE = 256  # that a process opens besides its connections

log = logging.getLogger(__name__)


class Refusals:
    """`hybridtei_refusals{limit="payload_limit"}` and its like, and `hybridtei_departed_connections`."""

    def __init__(self, registry: Registry) -> None:
        self._counter = registry.counter("hybridtei_refusals")
        self._departed = registry.counter("hybridtei_departed_connections")

    def count(self, limit: str | None) -> None:
        """A bound was reached; None: it was refused for something else."""
        if limit is not None:
            self._counter.add(limit=limit)

    def departed(self) -> None:
        """In a crowd, a connection was closed by its client before what it had sent was read."""
        self._departed.add()

    def counted(self, limit: str) -> int:
        """So far."""
        return int(self._counter.value(limit=limit))


def _nobody(limit: str = "") -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection, and all of them, may take; 0 seconds are no limit. `refused` is told the name of each reached, and
    `departed` of each connection that was closed before what it had sent was read. `unsent` counts what clients do not read."""

    connections: int
    head_bytes: int
    head_seconds: float
    body_seconds: float
    unread_seconds: float
    unsent: Unsent
    refused: Callable[[str], object] = _nobody
    departed: Callable[[], object] = _nobody

    @classmethod
    def of(cls, server: ServerConfig, refusals: Refusals | None = None, unsent: Unsent | None = None) -> ConnectionLimits:
        counts = (_nobody, _nobody) if refusals is None else (refusals.count, refusals.departed)
        return cls(
            server.max_connections,
            server.header_limit,
            server.header_timeout,
            server.body_timeout,
            UNREAD_SECONDS,
            unsent or Unsent(server.max_unsent_bytes),
            *counts,
        )

    def body_deadline(self, began: float, heard: float, size: int) -> float:
        """By when more of a body has to come, of which `size` bytes have, the last of them when it was `heard`; in seconds."""
        return min(heard, began + size / BODY_BYTES_PER_SECOND) + self.body_seconds

    def unread_deadline(self, began: float, read: float, size: int) -> float:
        """By when more of an answer has to be read, of which `size` bytes were, the last of them when it was `read`."""
        return min(read, began + size / BODY_BYTES_PER_SECOND) + self.unread_seconds


def allow_files(connections: int) -> None:
    """Have the operating system allow so many connections, or warn that it does not."""
    wanted = connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return
    allowed = wanted if hard == unlimited else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):
        allowed = soft
    if allowed < wanted:
        log.warning("the system allows %d open files: fewer than --max-connections (%d) takes", allowed, connections)
