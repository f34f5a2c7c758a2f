"""The certificate of `--certfile` and `--keyfile`: read before a model is loaded, and again when the server is told to.

HTTP and gRPC use it; the port of `--prometheus-port` stays plain, since scrapers beside a server rarely know its name.

The two files are written one after the other, so they are read into a new context, which replaces the old one only if
certificate and key match: `load_cert_chain` on the context in use would keep a certificate without its key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hybridtei.config import ServerConfig
from hybridtei.errors import LoadError
from hybridtei.server.http.limits import ConnectionLimits

log = logging.getLogger(__name__)


class Certificate:
    """Two PEM files, and what they held when they were last read."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises LoadError."""
        self._chain, self._key = chain, key
        self._context, self.pair = self._read()

    def accepting(self) -> ssl.SSLContext:
        """The context of a server: each handshake uses the certificate that was read last."""
        context = _new_context()
        context.sni_callback = self._use_current
        return context

    def reload(self) -> None:
        """Read the files again; if that fails, the certificate stays as it is, and the log says why."""
        try:
            self._context, self.pair = self._read()
        except LoadError as error:
            log.error("the certificate stays as it is: %s", error)
        else:
            log.info("read the certificate again")

    def _use_current(self, connection: ssl.SSLObject, name: str | None, initial: ssl.SSLContext) -> None:
        """Called in every handshake, also in one that names no server."""
        connection.context = self._context

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        """A context, and (key, chain) as gRPC wants them. Raises LoadError."""
        context = _new_context()
        try:
            pair = self._key.read_bytes(), self._chain.read_bytes()
            # A key with a password would ask for it at the terminal, which a server has not.
            context.load_cert_chain(self._chain, self._key, password=lambda: "")
            changed = pair != (self._key.read_bytes(), self._chain.read_bytes())
        except (OSError, ValueError) as error:
            where = f"--certfile {self._chain}, --keyfile {self._key}"
            raise LoadError(f"{where}: not a certificate and its key: {error}") from None
        if changed:
            raise LoadError(f"--certfile {self._chain}, --keyfile {self._key}: changed while they were read")
        return context, pair


def certificate_of(server: ServerConfig) -> Certificate | None:
    """What the settings name; None: no TLS. Raises LoadError."""
    if server.certfile is None or server.keyfile is None:
        return None
    return Certificate(Path(server.certfile), Path(server.keyfile))


def _new_context() -> ssl.SSLContext:
    """Of a server: TLS 1.2 at least, HTTP/1.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


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
