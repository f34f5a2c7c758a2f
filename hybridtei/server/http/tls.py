"""The certificate of `--certfile` and `--keyfile`: read before a model is loaded, and again when the server is told to.

HTTP and gRPC use it; the port of `--prometheus-port` stays plain, since scrapers beside a server rarely know its name.

The two files are written one after the other, so they are read into a new context, which replaces the old one only if
certificate and key match: `load_cert_chain` on the context in use would keep a certificate without its key.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from hybridtei.config import ServerConfig
from hybridtei.errors import LoadError

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
