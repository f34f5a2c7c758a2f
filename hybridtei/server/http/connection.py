"""Connections: their bounds, the unsent bytes of their answers, and what the application can ask about a request's client.

A scope's extensions tell whether the client disconnected, and whether its body can still arrive. ASGI reports a disconnect only
in `receive`, which a computing handler does not await.

After a grace period a body must arrive at a thousand bytes a second: otherwise a client that sends a byte now and then would
hold a place for weeks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import resource
import socket
from asyncio import Transport
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

from hybridtei.config import ServerConfig
from hybridtei.errors import AnswersUnsent
from hybridtei.system.metrics import Registry

# In a scope's extensions: the rest of the body will not come, but the client listens; the body came too slowly; a Disconnect;
# no permit was free.
BROKEN_BODY, SLOW_BODY, DISCONNECT = (
    "hybridtei.broken_body",
    "hybridtei.slow_body",
    "hybridtei.disconnect",
)
REFUSED = "hybridtei.refused"


class ClientDisconnected(Exception):
    """The client disconnected, and needs no answer."""


class Disconnect:
    """`happened` is True once the client has disconnected before its answer. A context manager: within it, a disconnect cancels
    the current task, and the cancellation becomes ClientDisconnected.

    ASGI servers report a disconnect only in `receive`, so each request would need a second task. `BoundedHttpProtocol` calls
    `notify` instead. Under another server the work continues.
    """

    __slots__ = ("_running", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._running: asyncio.Task[Any] | None = None

    def notify(self) -> None:
        self.happened = True
        if self._running is not None:
            self._running.cancel()

    def __enter__(self) -> None:
        self._running = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        running, self._running = self._running, None
        if self.happened and running is not None and kind is asyncio.CancelledError:
            running.uncancel()
            raise ClientDisconnected from None


def while_connected(scope: Any) -> Disconnect:
    """The disconnect of a request's client, to work within it."""
    return (scope.get("extensions") or {}).get(DISCONNECT) or Disconnect()


# The only paths that may end in a slash, also below /m/ALIAS
ENDING_IN_SLASH = re.compile(rb"(/m/[^/]*)?(/docs)?/")


def is_path(scope: Any) -> bool:
    """False for doubled and trailing slashes, which Litestar removes from a path and TEI does not."""
    raw = scope["raw_path"]
    path = unquote_to_bytes(raw) if b"%" in raw else raw
    return b"//" not in path and (path[-1:] != b"/" or ENDING_IN_SLASH.fullmatch(path) is not None)


class Answering:
    """The transport that answers write to. It sends a head together with its body: one packet and one system call, not two."""

    def __init__(self, transport: Transport, close: Callable[[], object]) -> None:
        """`close`: called instead of the transport's `close`."""
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
FILES_BESIDE = 256  # the number of files that a process opens besides its connections

log = logging.getLogger(__name__)


class ConnectionLimits:
    """The settings of each connection's bounds, and the count of unsent bytes of all connections."""

    def __init__(self, server: ServerConfig, registry: Registry) -> None:
        self.server = server
        self.unsent = Unsent(server.max_unsent_bytes)
        self._refusals = registry.counter("hybridtei_refusals_total")

    def refused(self, limit: str) -> None:
        """Count a request or a connection that was refused. `limit`: the setting of the reached bound."""
        self._refusals.add(limit=limit)


def body_deadline(began: float, heard: float, size: int, seconds: float) -> float:
    """The time at which the next bytes of a body are due. `size`: bytes so far; `heard`: the time of the last ones."""
    return min(heard, began + size / BODY_BYTES_PER_SECOND) + seconds


def allow_files(connections: int) -> None:
    """Raise the process's limit of open files to what `connections` need; log a warning if the system refuses."""
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


SMALL_BYTES = 1_000_000  # an answer up to this size does not wait
SMALL_SHARE = 4  # a quarter of the bound is left to small answers
WAIT_SECONDS = 30.0  # longer than the server keeps a client that reads nothing


class Unsent:
    """Counts the `bytes` of answers that are encoded, or about to be, and not yet taken by the system. For one event loop."""

    def __init__(self, limit: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.bytes = 0
        self._limit = limit
        self._large_limit = limit - limit // SMALL_SHARE
        self._wait_seconds = wait_seconds
        self._waiting_bytes = 0
        self._first = (
            asyncio.Lock()
        )  # held by the first waiting answer; the others queue for it in order of arrival
        self._fewer = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._limit

    def check(self) -> None:
        """Raises AnswersUnsent at the bound. Call it before any work for a request."""
        if self.bytes >= self._limit:
            raise self._refusal()

    def add(self, size: int) -> None:
        """Add `size` bytes, which may be negative."""
        self.bytes += size
        if size < 0:
            self._fewer.set()

    async def room(self, size: int) -> int:
        """Wait, in order of arrival, until an answer of about `size` bytes may be encoded.

        Returns the number of bytes counted for it; the caller must subtract them later. An answer larger than the bound runs
        alone. Raises AnswersUnsent after `wait_seconds`, or at once if the waiting answers reach the bound already.
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
    """Bind `port` and, if set, `prometheus_port`. The sockets refuse connections until a server listens.

    Raises OSError, naming the address."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(bound(server.hostname, server.port, shared=server.reuse_port))
        ]
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
