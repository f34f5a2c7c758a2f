"""Connections: their bounds and their sockets.

After a grace period a body must arrive at a thousand bytes a second: otherwise a client that sends
a byte now and then would hold a place for weeks.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hybridtei.config import ServerConfig
from hybridtei.limits import Bound
from hybridtei.system.metrics import Registry

BODY_BYTES_PER_SECOND = 1000
# The number of files that a process opens besides its connections
FILES_BESIDE = 256

log = logging.getLogger(__name__)


class ConnectionLimits:
    """The settings of each connection's bounds, and the count of unsent bytes of all
    connections."""

    def __init__(self, server: ServerConfig, registry: Registry) -> None:
        # Imported here: it imports Litestar, which a start imports while the model loads
        from hybridtei.server.answers import answers_unsent

        self.server = server
        self.unsent = Bound(server.max_unsent_bytes, answers_unsent)
        self._refusals = registry.counter("hybridtei_refusals_total")

    def refused(self, limit: str) -> None:
        """Count a request or a connection that was refused. `limit`: the setting of the reached
        bound."""
        self._refusals.add(limit=limit)


def body_deadline(began: float, heard: float, size: int, seconds: float) -> float:
    """The time at which the next bytes of a body are due. `size`: bytes so far; `heard`: the time
    of the last ones."""
    return min(heard, began + size / BODY_BYTES_PER_SECOND) + seconds


def allow_files(connections: int) -> None:
    """Raise the process's limit of open files to what `connections` need; log a warning if the
    system refuses."""
    needed = connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    allowed = needed if hard == unlimited else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):
        allowed = soft
    if allowed < needed:
        log.warning(
            "the system allows %d open files: fewer than --max-connections (%d) takes",
            allowed,
            connections,
        )


@contextmanager
def ports(server: ServerConfig) -> Iterator[list[socket.socket]]:
    """Bind `port` and, if set, `prometheus_port`. The sockets refuse connections until a server
    listens.

    Raises OSError, naming the address."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(bound(server.hostname, server.port, shared=server.reuse_port))
        ]
        if server.prometheus_port is not None:
            sockets.append(stack.enter_context(bound(server.hostname, server.prometheus_port)))
        yield sockets


def bound(hostname: str, port: int, *, shared: bool = False) -> socket.socket:
    """`hostname`: an IP address. `shared`: servers of the same user may share the port. Raises
    OSError, naming the address."""
    version = ipaddress.ip_address(hostname).version
    listening = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if version == 6:
        # `::` answers IPv4 too, on every system, as gRPC's port does
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listening.bind((hostname, port))
    except OSError as error:
        listening.close()
        raise OSError(
            f"cannot listen on {hostname}:{port}: {error.strerror}; choose another port"
        ) from error
    return listening
