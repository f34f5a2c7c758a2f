"""A Qdrant server or the nodes of a cluster: their addresses, their failures as our errors, and the
choice of a node.

A call goes to the first available node, and to the next one if there is no answer. A node that
refuses the connection, or answers 502 to 504, is marked as away at once; a hanging node after
`check_after_s` + `check_s`. Before that, a cheap call must fail too: otherwise only a collection's
nodes are away. A node that is away is checked every `RETURN_S`. While all nodes are away, calls
fail at once. Any other error is an answer that every node would give.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
import httpx
from qdrant_client import AsyncQdrantClient
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hybridtei.config import StoreConfig
from hybridtei.errors import HybridTeiError, StoreAway, StoreError, StoreUnavailable
from hybridtei.system.forks import REMEDY, renew_in_children
from hybridtei.system.own_loop import started
from hybridtei.system.retries import retry_after_s

T = TypeVar("T")
logger = logging.getLogger(__name__)
RETURN_S = 1.0
REST_PORT, GRPC_PORT = 6333, 6334
# By default a channel waits up to two minutes before it connects again, and half a minute before it
# resolves the name again.
CHANNEL = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2000,
    "grpc.dns_min_time_between_resolutions_ms": 1000,
}


CODE = grpc.StatusCode
CLIENT_ERRORS = (
    UnexpectedResponse,
    ResponseHandlingException,
    QdrantException,
    grpc.aio.AioRpcError,
    httpx.HTTPError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    AssertionError,
)
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
# The server or its proxy reports it as unavailable
AWAY = frozenset({502, 503, 504})
ADVICE = {
    400: "it rejects the request",
    401: "it needs a key: set `qdrant_api_key`",
    403: "this key is not allowed to do that, or a limit of Qdrant's strict mode is exceeded",
    404: "it has no such collection",
    408: "it took too long: raise `qdrant_timeout`, or give Qdrant more resources",
    409: "the name already exists",
    413: "the request is too large: raise Qdrant's `max_request_size_mb`",
    429: "it asks to slow down: send fewer requests, or raise Qdrant's rate limits",
    500: "it failed internally: its log has the reason, such as a full disk or unreachable nodes",
    507: "its disk or memory is full: free space, or add a node",
}
# Of HTTP, by the codes of gRPC that mean the same
STATUSES = {
    CODE.INVALID_ARGUMENT: 400,
    CODE.UNAUTHENTICATED: 401,
    CODE.PERMISSION_DENIED: 403,
    CODE.NOT_FOUND: 404,
    CODE.DEADLINE_EXCEEDED: 408,
    CODE.ALREADY_EXISTS: 409,
    CODE.RESOURCE_EXHAUSTED: 429,
    CODE.INTERNAL: 500,
    CODE.ABORTED: 425,
    CODE.UNAVAILABLE: 503,
}
# Of strict mode
UNINDEXED = re.compile(r'Index required but not found for \\?"(.+?)\\?".*?types: \[(\w+)')
DOWN = "it does not answer: check that it runs and that the address is right"


def store_error(error: BaseException, url: str) -> HybridTeiError:
    """The HybridTeiError for a client's error. A HybridTeiError is returned unchanged."""
    if isinstance(error, HybridTeiError):
        return error
    where = f"Qdrant at {url}"
    if isinstance(error, ResourceExhaustedResponse):
        return StoreUnavailable(
            f"{where}: {ADVICE[429]}: {error}", float(max(error.retry_after_s, 0))
        )
    if isinstance(error, UnexpectedResponse):
        detail = error.content.decode(errors="replace") or error.reason_phrase
        status = error.status_code or 0
        return _of_status(where, status, f"HTTP {status}: {detail[:500]}", error.headers)
    if isinstance(error, grpc.aio.AioRpcError):
        code = error.code()
        advice = None
        if code == CODE.UNAVAILABLE:
            advice = DOWN
        words = f"gRPC {code.name}: {str(error.details())[:500]}"
        return _of_status(where, STATUSES.get(code, 0), words, advice=advice)
    return _of_transport(error, where)


def _of_transport(error: BaseException, where: str) -> StoreError:
    """The error for a missing or unreadable answer. qdrant-client keeps the cause in `source`."""
    source = error.source if isinstance(error, ResponseHandlingException) else error
    if isinstance(source, httpx.TimeoutException | TimeoutError) and not isinstance(
        source, httpx.ConnectTimeout
    ):
        return StoreUnavailable(f"{where}: {ADVICE[408]}")
    if isinstance(source, httpx.TransportError | OSError):
        return StoreAway(f"{where}: {DOWN} ({type(source).__name__}: {source})")
    # qdrant-client raises this for a Retry-After that is no number
    if isinstance(error, QdrantException):
        return StoreUnavailable(f"{where}: {ADVICE[429]}: {error}")
    if isinstance(error, ResponseHandlingException):
        return StoreError(
            f"{where}: its answer is not Qdrant's: another service, or an incompatible version? "
            f"({source})"
        )
    return StoreError(f"{where}: {type(source).__name__}: {source}")


def _of_status(
    where: str, status: int, words: str, headers: Any = None, *, advice: str | None = None
) -> StoreError:
    if lacking := UNINDEXED.search(words):
        index = ":".join(lacking.groups())
        advice = (
            f"it filters only by keys with a payload index: `hybridtei ingest … --index {index}` "
            f'makes one, and `"index": ["{index}"]` of /collections/NAME/points'
        )
    message = f"{where}: {advice or ADVICE.get(status, 'it refused')} ({words})"
    asked_s = retry_after_s(headers)
    # A node that asks the client to wait is not away: it answers for the whole cluster
    if status in AWAY and asked_s is None:
        return StoreAway(message)
    if status in TRANSIENT:
        return StoreUnavailable(message, asked_s)
    return StoreError(message)


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address. `port`: for REST; None if unknown. `grpc_port`: None if only REST is
    used."""

    host: str
    port: int | None
    grpc_port: int | None
    tls: bool
    prefix: str = ""


def address_of(url: str, rest_port: int | None = None) -> Address:
    """Read a server's address. Raises StoreError. Only the user's port and Qdrant's two default
    ports are used.

    `http(s)://host` with port 6333, 6334 or none: gRPC on 6334. Any other port, or a path: REST
    there, since proxies speak it.
    `grpc(s)://host:port`: gRPC there, REST at `rest_port`, or at 6333 beside 6334.
    """
    if "@" in url or "?" in url:
        raise StoreError(
            "`qdrant_url` holds a user, password or query: give the key as `qdrant_api_key`"
        )
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise StoreError(f"`qdrant_url` {url!r}: {error}") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise StoreError(
            f"`qdrant_url` {url!r}: should look like http://host:6334, https://host or "
            "grpc://host:port"
        )
    prefix, tls = parts.path.rstrip("/"), parts.scheme in ("https", "grpcs")
    if parts.scheme in ("grpc", "grpcs"):
        beside = REST_PORT if port in (None, GRPC_PORT) else None
        return Address(parts.hostname, rest_port or beside, port or GRPC_PORT, tls)
    if port in (None, REST_PORT, GRPC_PORT) and not prefix:
        return Address(parts.hostname, REST_PORT, GRPC_PORT, tls)
    return Address(parts.hostname, port or REST_PORT, None, tls, prefix)


def urls_of(urls: str) -> list[str]:
    """The addresses of a cluster's nodes, the preferred first. Raises StoreError if one is
    empty."""
    addresses = [url.strip().rstrip("/") for url in urls.split(",")]
    if not all(addresses):
        raise StoreError("`qdrant_url` should be addresses with commas between them")
    return list(dict.fromkeys(addresses))


def client_of(url: str, address: Address, config: StoreConfig) -> AsyncQdrantClient:
    """A client of one node, which connects at its first call. Raises StoreError."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            client = AsyncQdrantClient(
                host=address.host,
                port=address.port or address.grpc_port,
                grpc_port=address.grpc_port or GRPC_PORT,
                prefer_grpc=address.grpc_port is not None,
                https=address.tls,
                prefix=address.prefix or None,
                api_key=config.qdrant_api_key,
                timeout=math.ceil(config.qdrant_timeout),
                grpc_options=dict(CHANNEL),
                check_compatibility=False,
            )
        except ValueError as error:
            raise StoreError(f"`qdrant_url` {url!r}: {error}") from error
    for warning in caught:
        logger.warning("Qdrant at %s: %s", url, warning.message)
    return client


Attempt = Callable[[AsyncQdrantClient], Awaitable[T]]


@dataclass(eq=False, slots=True)
class Node:
    """A node. `away`: the error that marked it as away, or None. `check`: the running or last one.
    `next_check`: of a node that is away."""

    url: str
    client: AsyncQdrantClient
    away: StoreAway | None = None
    check: asyncio.Task[None] | None = None
    next_check: asyncio.TimerHandle | None = None


class Nodes:
    """The clients of all nodes by address, the preferred first. For one event loop. `check`: a
    cheap call to a node.

    `check_after_s`: how long a call waits before its node is checked; the check takes at most
    `check_s`. None: no checks.
    """

    def __init__(
        self,
        clients: Mapping[str, AsyncQdrantClient],
        check: Attempt[object],
        check_after_s: float | None,
        check_s: float = 0.0,
    ) -> None:
        self._nodes = [Node(url, client) for url, client in clients.items()]
        self._check, self._check_after_s, self._check_s = check, check_after_s, check_s
        self._is_forked = False
        renew_in_children(self)

    def renew(self) -> None:
        """Refuse all calls of this forked process: gRPC's channels do not survive a fork."""
        self._is_forked = True

    async def call(self, attempt: Attempt[T], among: Collection[str] | None = None) -> T:
        """Try the call at one node after the other until one answers. `among`: only these nodes.
        Raises the last node's StoreError."""
        failure: StoreAway | None = None
        if self._is_forked:
            raise StoreError(f"the store was opened in another process, and does not work {REMEDY}")
        for node in self._nodes:
            if among is not None and node.url not in among:
                continue
            if node.away is not None:
                failure = failure or StoreAway(str(node.away))
                continue
            try:
                return await self._asked(node, attempt)
            except StoreAway as error:
                failure = error
        assert failure is not None
        raise failure

    async def close(self) -> None:
        """Close all clients."""
        for node in self._nodes:
            for pending in (node.next_check, node.check):
                if pending is not None:
                    pending.cancel()
            await node.client.close()

    async def _asked(self, node: Node, attempt: Attempt[T]) -> T:
        running = asyncio.ensure_future(attempt(node.client))
        try:
            while not (await asyncio.wait([running], timeout=self._check_after_s))[0]:
                await asyncio.shield(self._check_of(node))
                if node.away is not None:
                    raise node.away
            return running.result()
        except CLIENT_ERRORS as error:
            failure = store_error(error, node.url)
            if isinstance(failure, StoreAway) and self._check_after_s is not None:
                await asyncio.shield(self._check_of(node))
            raise failure from error
        finally:
            running.cancel()

    def _check_of(self, node: Node) -> asyncio.Task[None]:
        """The check of a node, started if none is running. Concurrent calls share one."""
        if node.check is None or node.check.done():
            node.check = started(self._mark(node))
        return node.check

    async def _mark(self, node: Node) -> None:
        """Mark the node as away unless it answers, even with an error. Check a node that is away
        again after `RETURN_S`."""
        failure: HybridTeiError | None = None
        try:
            async with asyncio.timeout(self._check_s):
                await self._check(node.client)
        except TimeoutError:
            waited_s = (self._check_after_s or 0.0) + self._check_s
            failure = StoreAway(
                f"Qdrant at {node.url}: has not answered for {waited_s:g} s: is it running, or "
                "overloaded?"
            )
        except CLIENT_ERRORS as error:
            failure = store_error(error, node.url)
        node.away = None
        if node.next_check is not None:
            node.next_check.cancel()
        if isinstance(failure, StoreAway):
            node.away = failure
            loop = asyncio.get_running_loop()
            node.next_check = loop.call_later(RETURN_S, self._check_of, node)
