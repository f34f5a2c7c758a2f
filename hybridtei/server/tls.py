"""The certificate of `--certfile` and `--keyfile`, looked at before anything is loaded; read again when the server is told to.

HTTP and gRPC have it; the port of `--prometheus-port` stays plain, since scrapers beside a server rarely know its name.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from hybridtei.config import ServerConfig
from hybridtei.errors import LoadError


@dataclass(frozen=True, slots=True)
class Certificate:
    """Two PEM files."""

    chain: Path
    key: Path

    def load(self, context: ssl.SSLContext) -> None:
        """Handshakes from now on use what the files hold. Raises LoadError; the context is as before then."""
        try:
            # A key with a password would ask for it at the terminal, which a server has not.
            context.load_cert_chain(self.chain, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise LoadError(f"--certfile {self.chain}, --keyfile {self.key}: not a certificate and its key: {error}") from None

    def pair(self) -> tuple[bytes, bytes]:
        """(key, chain) as they stand in the files."""
        return self.key.read_bytes(), self.chain.read_bytes()


def certificate_of(server: ServerConfig) -> Certificate | None:
    """What the settings name, looked at; None: no TLS. Raises LoadError."""
    if server.certfile is None or server.keyfile is None:
        return None
    certificate = Certificate(Path(server.certfile), Path(server.keyfile))
    new_context(certificate)
    return certificate


def new_context(certificate: Certificate) -> ssl.SSLContext:
    """Of a server: TLS 1.2 at least, HTTP/1.1. Raises LoadError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate.load(context)
    return context
