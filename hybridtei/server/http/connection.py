"""Connections: their bounds, how many bytes of answers they have not taken, and what the application learns of a request's
client.

Whether a client disconnected, or its body can still come, stands in a scope's extensions: an ASGI server tells of a disconnect
only in `receive`, which a handler that computes does not await.

A body has to come at a thousand bytes a second, less a grace period: a client that sends a byte now and then would otherwise
hold a place for weeks without ever standing still.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
from asyncio import Transport
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from hybridtei.config import ServerConfig
from hybridtei.errors import AnswersUnsent
from hybridtei.system.metrics import Registry

# In a scope's extensions: no more of the body will come, and its client still listens; it came too slowly; a Disconnect; no
# permit was free.
BROKEN_BODY, SLOW_BODY, DISCONNECT = "hybridtei.broken_body", "hybridtei.slow_body", "hybridtei.disconnect"
REFUSED = "hybridtei.refused"


class ClientDisconnected(Exception):
    """The client disconnected, and needs no answer."""


class Disconnect:
    """Whether a request's client disconnected before its answer. `on_disconnect` is called when it does."""

    __slots__ = ("happened", "on_disconnect")

    def __init__(self) -> None:
        self.happened = False
        self.on_disconnect: Callable[[], object] | None = None

    def notify(self) -> None:
        """Set `happened`, and call `on_disconnect`."""
        self.happened = True
        if self.on_disconnect is not None:
            self.on_disconnect()


class Answering:
    """A connection's transport as answers use it: a head waits for its body, one packet and one system call in place of two."""

    def __init__(self, transport: Transport, close: Callable[[], object]) -> None:
        """`close`: called in place of the transport's own."""
        self.is_closing = transport.is_closing
        self._transport = transport
        self._close = close
        self._head: bytes | memoryview = b""

    def write(self, data: bytes | memoryview) -> None:
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif data[:9] == b"HTTP/1.1 " and data[9:12] != b"100":
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write a head that has no body."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._close()


BODY_BYTES_PER_SECOND = 1000
FILES_BESIDE = 256  # that a process opens besides its connections

log = logging.getLogger(__name__)


class ConnectionLimits:
    """The bounds of each connection and of all: settings, and the bytes that clients do not read."""

    def __init__(self, server: ServerConfig, registry: Registry) -> None:
        self.server = server
        self.unsent = Unsent(server.max_unsent_bytes)
        self._refusals = registry.counter("hybridtei_refusals_total")

    def refused(self, limit: str) -> None:
        """Count a request or a connection that was refused at a bound. `limit`: its setting."""
        self._refusals.add(limit=limit)


def body_deadline(began: float, heard: float, size: int, seconds: float) -> float:
    """When the next bytes of a body are due, in seconds. `size`: bytes so far; `heard`: when the last of them came."""
    return min(heard, began + size / BODY_BYTES_PER_SECOND) + seconds


def allow_files(connections: int) -> None:
    """Have the operating system allow so many connections, or warn that it does not."""
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
        log.warning("the system allows %d open files: fewer than --max-connections (%d) takes", allowed, connections)


SMALL_BYTES = 1_000_000  # an answer of no more does not wait
SHARE_LEFT = 4  # to small answers, one byte of so many
WAIT_SECONDS = 30.0  # longer than a client that reads nothing is kept


class Unsent:
    """How many `bytes` of answers are encoded, or about to be, and not yet taken by the system. For one event loop."""

    def __init__(self, limit: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.bytes = 0
        self._limit = limit
        self._large_limit = limit - limit // SHARE_LEFT
        self._wait_seconds = wait_seconds
        self._waiting_bytes = 0
        self._first = asyncio.Lock()  # held by the first that waits; the others wait for it, in order of arrival
        self._fewer = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._limit

    def check(self) -> None:
        """To be called before any work for a request. Raises AnswersUnsent at the bound."""
        if self.is_full:
            raise self._refusal()

    def add(self, size: int) -> None:
        """Add `size` bytes, which may be negative."""
        self.bytes += size
        if size < 0:
            self._fewer.set()

    async def room(self, size: int) -> int:
        """Wait until an answer of about `size` bytes may be encoded, in order of arrival.

        Returns how many bytes were counted for it, which the caller has to take back. An answer of more than all is let in
        alone. Raises AnswersUnsent after `wait_seconds`, or at once if as much as the bound waits already.
        """
        size = min(size, self._large_limit)
        if self._waiting_bytes + size > self._limit:
            raise self._refusal()
        self._waiting_bytes += size
        try:
            async with asyncio.timeout(self._wait_seconds), self._first:
                while self.bytes + size > self._large_limit:
                    self._fewer.clear()
                    await self._fewer.wait()
                self.bytes += size
        except TimeoutError:
            raise self._refusal() from None
        finally:
            self._waiting_bytes -= size
        return size

    def _refusal(self) -> AnswersUnsent:
        return AnswersUnsent(
            f"{self.bytes} bytes of answers wait for clients that do not read them, {self._limit} are allowed "
            "(max-unsent-bytes): try again later"
        )


@contextmanager
def ports(server: ServerConfig) -> Iterator[list[socket.socket]]:
    """The sockets of `port` and, if there is one, `prometheus_port`: taken, and refusing connections until a server listens.

    Raises OSError, naming the address."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(bound(server.hostname, server.port, shared=server.reuse_port))]
        if server.prometheus_port is not None:
            sockets.append(stack.enter_context(bound(server.hostname, server.prometheus_port)))
        yield sockets


def bound(hostname: str, port: int, *, shared: bool = False) -> socket.socket:
    """`hostname`: an IP address. `shared`: servers of the same user may share the port. Raises OSError, naming the address."""
    version = ipaddress.ip_address(hostname).version
    listening = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if version == 6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listening.bind((hostname, port))
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {hostname}:{port}: {error.strerror}") from error
    return listening
