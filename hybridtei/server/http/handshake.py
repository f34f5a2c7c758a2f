"""A connection before its TLS handshake is done: bounded in number and time, as those are that have begun to speak HTTP.

The event loop's own servers hand a connection over after its handshake; of one that never ends, nothing here would know. So
they accept without TLS, and what they accepted is given to the loop again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from hybridtei.server.http.limits import ConnectionLimits

HANDSHAKE_SECONDS = 10.0

Begun = dict[asyncio.Task[None], None]


class Handshake(asyncio.Protocol):
    """One connection. When too many are in their handshake, the one that has been longest in it is closed."""

    def __init__(self, begun: Begun, context: ssl.SSLContext, limits: ConnectionLimits, make: Callable[[], Any]) -> None:
        """`begun`: the handshakes of the server, the oldest first. `make`: the protocol that takes over."""
        self._begun = begun
        self._context = context
        self._limits = limits
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with suppress(OSError):  # no file is left for it
            accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            accepted.setblocking(False)
            task = asyncio.ensure_future(self._run(accepted))
            self._begun[task] = None
            task.add_done_callback(lambda _: self._begun.pop(task, None))
        cast(asyncio.Transport, transport).abort()  # which has read nothing yet
        if len(self._begun) > self._limits.connections:
            self._limits.refused("max_connections")
            oldest = next(iter(self._begun))
            del self._begun[oldest]
            oldest.cancel()

    async def _run(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # what is no handshake, or takes too long: ssl's errors are OSErrors
            await loop.connect_accepted_socket(self._make, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS)
