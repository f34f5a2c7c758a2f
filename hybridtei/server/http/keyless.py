"""Bodies that are read although their heads carried no key, because it may stand in the body.

Anybody can send them, so what is held of all of them is bounded, half of it for one peer, and so are their number for each peer
and the time they take. A body that comes whole with its head costs nothing here; most do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hybridtei.server.http.body import BodyError, SlowBody

LIMIT_BYTES = 16_000_000
PEER_SHARE = 2
BODIES_PER_PEER = 8  # that are read on at once; others wait
SECONDS = 10.0

Receive = Callable[[], Awaitable[Any]]


class KeylessBodies(BodyError):
    """Too much is held of bodies whose heads carried no key."""

    status = 503
    prefix = (
        "Failed to buffer the request body: too much is on its way without a key in a header; send one, or try again later: "
    )


@dataclass(slots=True)
class _Peer:
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BODIES_PER_PEER))
    bodies: int = 0
    bytes: int = 0


class Keyless:
    """How many `bytes` are held of such bodies, and whose. For one event loop."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES, seconds: float | None = None) -> None:
        self.bytes = 0
        self._limit_bytes = limit_bytes
        self._seconds = SECONDS if seconds is None else seconds
        self._peers: dict[str, _Peer] = {}

    @asynccontextmanager
    async def bounded(self, scope: Any, receive: Receive) -> AsyncIterator[Receive]:
        """Within, one body is read by what this gives in place of `receive`. Raises KeylessBodies, SlowBody."""
        name = (scope.get("client") or ("", 0))[0]
        held, placed = 0, False
        peer: _Peer | None = None

        async def receive_bounded() -> Any:
            nonlocal held, placed, peer
            event = await receive()
            if not event.get("more_body", False):
                return event
            if peer is None:
                peer = self._peers.setdefault(name, _Peer())
                peer.bodies += 1
            size = len(event["body"])
            held += size
            peer.bytes += size
            self.bytes += size
            if self.bytes > self._limit_bytes:
                raise KeylessBodies(f"{self._limit_bytes} bytes of all")
            if peer.bytes > self._limit_bytes // PEER_SHARE:
                raise KeylessBodies(f"{self._limit_bytes // PEER_SHARE} bytes of one peer")
            if not placed:
                placed = await peer.places.acquire()
            return event

        try:
            async with asyncio.timeout(self._seconds):
                yield receive_bounded
        except TimeoutError:
            raise SlowBody(f" within {self._seconds:g} seconds without a key in a header") from None
        finally:
            if peer is not None:
                self._forget(name, peer, held, placed=placed)

    def _forget(self, name: str, peer: _Peer, held: int, *, placed: bool) -> None:
        self.bytes -= held
        peer.bytes -= held
        peer.bodies -= 1
        if placed:
            peer.places.release()
        if not peer.bodies:
            del self._peers[name]
