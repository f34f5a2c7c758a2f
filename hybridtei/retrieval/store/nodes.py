"""Nodes of one cluster: calls go to the first that answers, and to the next of them where it does not.

A node that refuses a connection, or says that it or what is behind it is unavailable (502 to 504), is left at once; one that
hangs after `CHECK_AFTER_S` and `CHECK_S` together, which is less than a second. Any other error is an answer, of one collection
perhaps, and another node would give the same. All calls leave a node together. While another node than the first is asked, the
first is checked each `RETURN_S`, and is asked again once it answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from qdrant_client import AsyncQdrantClient

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreAway, StoreError
from hybridtei.retrieval.store.failures import CLIENT_ERRORS, answered, check_answers, store_error

T = TypeVar("T")
CHECK_AFTER_S, CHECK_S = 0.5, 0.4
RETURN_S = 1.0
REST_PORT, GRPC_PORT = 6333, 6334
# By default a channel waits up to two minutes before it connects again, and half a minute before it resolves the name again.
CHANNEL = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2000,
    "grpc.dns_min_time_between_resolutions_ms": 1000,
}
logger = logging.getLogger(__name__)
Check = Callable[[AsyncQdrantClient], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address: `port` for REST, None where it is not known; `grpc_port` is None where only REST is used."""

    host: str
    port: int | None
    grpc_port: int | None
    tls: bool
    prefix: str = ""


def address_of(url: str, rest_port: int | None = None) -> Address:
    """Read a server's address. Raises StoreError. No port is asked that the user did not give, but for Qdrant's two.

    `http(s)://host` with port 6333, 6334 or none: gRPC on 6334. Any other port, or a path: REST there, since proxies speak it.
    `grpc(s)://host:port`: gRPC there, REST at `rest_port`, or at 6333 beside 6334.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise StoreError(f"`qdrant_url` {url!r}: {error}") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise StoreError(f"`qdrant_url` {url!r}: should look like http://host:6334, https://host or grpc://host:port")
    if parts.username or parts.password or parts.query:
        raise StoreError("`qdrant_url` holds a user, password or query: give the key as `qdrant_api_key`")
    prefix, tls = parts.path.rstrip("/"), parts.scheme in ("https", "grpcs")
    if parts.scheme in ("grpc", "grpcs"):
        beside = REST_PORT if port in (None, GRPC_PORT) else None
        return Address(parts.hostname, rest_port or beside, port or GRPC_PORT, tls)
    if port in (None, REST_PORT, GRPC_PORT) and not prefix:
        return Address(parts.hostname, REST_PORT, GRPC_PORT, tls)
    return Address(parts.hostname, port or REST_PORT, None, tls, prefix)


def urls_of(urls: str) -> list[str]:
    """The addresses of a cluster's nodes, the preferred first. Raises StoreError where one is empty."""
    found = [url.strip().rstrip("/") for url in urls.split(",")]
    if not all(found):
        raise StoreError(f"`qdrant_url` {urls!r}: should be addresses with commas between them")
    return list(dict.fromkeys(found))


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


class Nodes:
    """(address, client) of each node, the preferred first; used from one event loop. `check`: a cheap call to one."""

    def __init__(
        self,
        nodes: Sequence[tuple[str, AsyncQdrantClient]],
        check: Check,
        *,
        clock: Callable[[], float] = time.monotonic,
        check_after_s: float = CHECK_AFTER_S,
        check_s: float = CHECK_S,
    ) -> None:
        self._nodes, self._check, self._clock = nodes, check, clock
        self._check_after_s, self._check_s = check_after_s, check_s
        self._at = 0
        self._return_s = 0.0
        self._returning: asyncio.Task[None] | None = None

    @property
    def client(self) -> AsyncQdrantClient:
        """Of the node that is asked now."""
        return self._nodes[self._at][1]

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result, tried once at each node while they are unavailable; an attempt asks `client`.

        Raises the last node's error.
        """
        self._look_for_first()
        for left in range(len(self._nodes) - 1, -1, -1):
            at = self._at
            try:
                return await self._answered(at, attempt)
            except StoreAway:
                if not left:
                    raise
            if at == self._at:  # no other call has left it meanwhile
                self._at = (at + 1) % len(self._nodes)
                self._return_s = self._clock() + RETURN_S
        raise AssertionError

    async def first_answer(
        self, ask: Callable[[AsyncQdrantClient], Awaitable[T]], timeout_s: float, urls: Collection[str]
    ) -> T:
        """The answer of the first of these nodes that gives one; none is left for failing to. Raises the last's StoreError."""
        failure: BaseException | None = None
        for url, client in self._nodes:
            if url not in urls:
                continue
            try:
                async with asyncio.timeout(timeout_s):
                    return await ask(client)
            except CLIENT_ERRORS as error:
                failure = store_error(error, url)
        assert failure is not None
        raise failure

    async def close(self) -> None:
        """Closes every client."""
        if self._returning is not None:
            self._returning.cancel()
        for _, client in self._nodes:
            await client.close()

    async def _answered(self, at: int, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result. Raises StoreAway where the node hangs, while there are others."""
        url, client = self._nodes[at]

        async def checked() -> None:
            await check_answers(lambda: self._check(client), url, self._check_after_s, self._check_s)

        try:
            return await answered(attempt, checked, self._check_after_s if len(self._nodes) > 1 else None)
        except CLIENT_ERRORS as error:
            raise store_error(error, url) from error

    def _look_for_first(self) -> None:
        """Starts a check of the first node, where another is asked and it is time."""
        if self._at and self._clock() >= self._return_s and (self._returning is None or self._returning.done()):
            self._return_s = self._clock() + RETURN_S
            self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        try:
            async with asyncio.timeout(self._check_s):
                await self._check(self._nodes[0][1])
        except CLIENT_ERRORS:
            return
        self._at = 0
