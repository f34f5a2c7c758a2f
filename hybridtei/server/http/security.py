"""Keys, `Authorization: Bearer KEY` byte for byte (`serve` spells `bearer` so), and the certificate
of `--certfile` and `--keyfile`.

The server reads their files before it loads a model, and again on SIGHUP. HTTP and gRPC use both.
The port of `--prometheus-port` has no TLS, since scrapers inside a cluster rarely know the server's
name.

Certificate and key are two files, written one after the other. They are read into a new context,
which replaces the old one only if they match: `load_cert_chain` on the context in use would keep a
new certificate with the old key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from hmac import compare_digest
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import Any, Literal, cast, get_args

from hybridtei.config import ServerConfig
from hybridtei.errors import (
    LoadError,
    NoKey,
    OtherHost,
    OtherOrigin,
    Overloaded,
    RoleNeeded,
)
from hybridtei.limits import SPENDING, Bound, Meter, Spending
from hybridtei.server.http.body import first_fields
from hybridtei.server.http.connection import ConnectionLimits
from hybridtei.system.machine import read_bounded
from hybridtei.system.metrics import Registry
from hybridtei.system.tracing import CALLER

# The name of the key of `--api-key` in metrics
FLAG_NAME = "api-key"
KeyRole = Literal["infer", "search", "write", "manage"]
ROLES: tuple[KeyRole, ...] = get_args(KeyRole)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OWNER = re.compile(
    rf"({NAME.pattern})(?: roles=([a-z]+(?:,[a-z]+)*))?(?: tokens_per_minute=([1-9]\d{{0,11}}))?",
    re.ASCII,
)
# The key of the request or call, also in tasks that it starts
KEY: ContextVar[Key | None] = ContextVar("key", default=None)
MAX_KEYS, MAX_FILE_BYTES = 1000, 1_000_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """A key's name, roles, digest, and the tokens that it may use, if they are bounded."""

    name: str
    digest: bytes
    roles: tuple[KeyRole, ...] = ROLES
    meter: Meter | None = None


class Keyring:
    """The keys of a server, and a counter of requests by key. Without keys, `is_open`."""

    def __init__(
        self, key: str | None = None, file: Path | None = None, registry: Registry | None = None
    ) -> None:
        """Raises LoadError, naming the file and the line."""
        registry = registry or Registry()
        self._counter = registry.counter("hybridtei_key_requests_total")
        self._tokens = registry.counter("hybridtei_key_tokens_total")
        self._fixed = () if key is None else (Key(FLAG_NAME, _digest(key.encode())),)
        self._file = file
        # No key is needed
        self.is_open = key is None and file is None
        self._keys = self._read()

    @classmethod
    def of(cls, server: ServerConfig, registry: Registry | None = None) -> Keyring:
        """Raises LoadError."""
        return cls(
            server.api_key,
            None if server.api_key_file is None else Path(server.api_key_file),
            registry,
        )

    def check(self, authorization: bytes, role: KeyRole | None, token: str | None = None) -> None:
        """Check and count the key of a header, or else `token`, and keep it for its tokens and the
        log. Does nothing on a server without keys.

        `role`: the role that the key needs; None: every known key. Raises NoKey, RoleNeeded,
        TokensUsed.
        """
        if self.is_open:
            return
        key = self.find_in_header(authorization)
        if key is None and token is not None:
            key = self.find(token.encode("utf-8", "replace"))
        if key is None:
            raise NoKey("no API key or an unknown one: send the header `Authorization: Bearer KEY`")
        KEY.set(key)
        self._counter.add(key=key.name)
        if key.name != FLAG_NAME:
            CALLER.set(key.name)
        if role is not None and role not in key.roles:
            raise RoleNeeded(role, key.name, key.roles)
        if role is not None:
            self.count(key)

    def count(self, key: Key) -> None:
        """Count the tokens that the calling task computes from now on for a key. Raises TokensUsed
        if it has used them."""
        if key.meter is not None:
            key.meter.check()
        SPENDING.set(Spending(partial(self._tokens.add, key=key.name), key.meter))

    def find(self, value: bytes) -> Key | None:
        """The known key with this value, or None."""
        digest, match = _digest(value), None
        for key in self._keys:
            if compare_digest(digest, key.digest):
                match = key
        return match

    def find_in_header(self, value: bytes) -> Key | None:
        """The known key in `Bearer KEY`, compared byte for byte."""
        prefix, key = value[:7], value[7:]
        return self.find(key) if prefix == b"Bearer " else None

    def reload(self) -> None:
        """Read the file again. If that fails, log the error and keep the keys."""
        before = self._keys
        try:
            self._keys = self._read()
        except LoadError as error:
            log.error("the old keys stay in use: %s", error)
        else:
            meters = {(key.digest, key.meter.limit): key.meter for key in before if key.meter}
            self._keys = tuple(_metered(key, meters) for key in self._keys)
            log.info("read the keys again: %s", ", ".join(key.name for key in self._keys))

    def _read(self) -> tuple[Key, ...]:
        return self._fixed if self._file is None else (*self._fixed, *read_keys(self._file))


def read_keys(path: Path) -> list[Key]:
    """Read a file's keys. Raises LoadError, naming the line but not its content."""
    try:
        lines = read_bounded(path, MAX_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(
            f"{path}: cannot be read as a list of keys: {type(error).__name__}"
        ) from None
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            key = _entry(line, f"{path}: line {number}")
            if key.name in keys or key.name == FLAG_NAME:
                raise LoadError(f"{path}: line {number}: a second key named {key.name}")
            keys[key.name] = key
    if not keys or len(keys) > MAX_KEYS:
        raise LoadError(
            f"{path}: holds {len(keys)} keys; it should hold at least one, and at most {MAX_KEYS}"
        )
    return [*keys.values()]


def _metered(key: Key, meters: Mapping[tuple[bytes, int], Meter]) -> Key:
    """The key with its meter before a reading of the file, unless its bound is another one."""
    if key.meter is None:
        return key
    return replace(key, meter=meters.get((key.digest, key.meter.limit), key.meter))


def is_sendable(key: str) -> bool:
    """True if a header can carry the key: printable ASCII without spaces at the ends."""
    return bool(key) and key.strip() == key and key.isascii() and key.isprintable()


def _entry(line: str, where: str) -> Key:
    owner, colon, key = line.strip().partition(":")
    match = OWNER.fullmatch(owner)
    if not colon or match is None:
        raise LoadError(
            f"{where}: should be `NAME:KEY`, `NAME roles=ROLE,ROLE:KEY` or "
            "`NAME roles=ROLE,ROLE tokens_per_minute=N:KEY`; a name is 1 to 64 letters, digits, "
            "dots, dashes, underscores"
        )
    names = ROLES if match[2] is None else match[2].split(",")
    roles = tuple(role for role in ROLES if role in names)
    if len(roles) < len(names):
        raise LoadError(
            f"{where}: each role should be one of {', '.join(ROLES)}, and stand there once"
        )
    if not is_sendable(key):
        raise LoadError(
            f"{where}: no header can carry this key; it should be printable ASCII without a space "
            "at either end"
        )
    meter = None if match[3] is None else Meter(int(match[3]))
    return Key(match[1], _digest(key.encode()), roles, meter)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Certificate:
    """Two PEM files, and their contents at the last reading."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises LoadError."""
        self._chain, self._key = chain, key
        self._context, self.pair = self._read()

    def accepting(self) -> ssl.SSLContext:
        """The context of a listening socket. Each handshake uses the latest certificate."""
        context = _new_context()
        context.sni_callback = self._use_current
        return context

    def reload(self) -> None:
        """Read the files again. If that fails, log the error and keep the certificate."""
        try:
            self._context, self.pair = self._read()
        except LoadError as error:
            log.error("the old certificate stays in use: %s", error)
        else:
            log.info("read the certificate again")

    def _use_current(
        self, connection: ssl.SSLObject, name: str | None, initial: ssl.SSLContext
    ) -> None:
        """Called in every handshake, even without a server name."""
        connection.context = self._context

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        """Return a context, and (key, chain) for gRPC. Raises LoadError."""
        context = _new_context()
        try:
            pair = self._pair()
            # OpenSSL would ask for a key's password at a terminal, and a server has none.
            context.load_cert_chain(self._chain, self._key, password=lambda: "")
            changed = pair != self._pair()
        except (OSError, ValueError) as error:
            where = f"--certfile {self._chain}, --keyfile {self._key}"
            raise LoadError(f"{where}: not a certificate and its key: {error}") from None
        if changed:
            raise LoadError(
                f"--certfile {self._chain}, --keyfile {self._key}: changed while they were read"
            )
        return context, pair

    def _pair(self) -> tuple[bytes, bytes]:
        key, chain = (read_bounded(path, MAX_FILE_BYTES) for path in (self._key, self._chain))
        return key, chain


def certificate_of(server: ServerConfig) -> Certificate | None:
    """The certificate of the settings; None: no TLS. Raises LoadError."""
    if server.certfile is None or server.keyfile is None:
        return None
    return Certificate(Path(server.certfile), Path(server.keyfile))


def _new_context() -> ssl.SSLContext:
    """A server's context: HTTP/1.1 over TLS 1.2 or later, Python's default."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    return context


HANDSHAKE_SECONDS = 10.0


@dataclass(eq=False)
class Handshake(asyncio.Protocol):
    """The TLS handshake of one connection. If too many run at once, the oldest is closed."""

    # Running handshakes of the server
    begun: Bound
    context: ssl.SSLContext
    limits: ConnectionLimits
    plain_port: int | None
    # The protocol after the handshake, or at once on `plain_port`
    make: Callable[[], Any]
    task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if transport.get_extra_info("sockname")[1] == self.plain_port:
            plain = self.make()
            transport.set_protocol(plain)
            plain.connection_made(transport)
            return
        # `dup` raises OSError if the process has no file descriptor left
        with suppress(OSError):
            accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            accepted.setblocking(False)
            self.task = asyncio.ensure_future(self._run(accepted))
        # The copied socket loses nothing, since the transport has read nothing yet
        cast(asyncio.Transport, transport).abort()

    async def _run(self, accepted: socket.socket) -> None:
        shaking = asyncio.get_running_loop().connect_accepted_socket(
            self.make, accepted, ssl=self.context, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
        # A client that sends no valid handshake, or is too slow, is dropped without a log line:
        # asyncio raises an OSError, and ssl.SSLError is one
        try:
            with suppress(OSError), self.begun.inside(0) as holder:
                holder.take(1)
                await holder.within(inf, shaking)
        except Overloaded:
            self.limits.refused("max_connections")


# Characters of a name
MAX_SHOWN = 100
# Values of Sec-Fetch-Site; none: the user's own action, such as a bookmark
OWN = (b"same-origin", b"none")


# Names below these endings belong to no one on the Internet, so no stranger's page is loaded by one
LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")


def check_host(scope: Any, allowed: Collection[str]) -> None:
    """Raises OtherHost for a name that a stranger may own: his page, loaded by it, would be this
    server's own page once the name leads here (DNS rebinding). Addresses, names without a dot and
    `allowed` (`--hostname`, `--allowed-host`) pass."""
    host = first_fields(scope).get(b"host", b"").decode("latin-1").lower()
    # The port is cut off; an IPv6 address without a port ends with a bracket
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if "." not in name or name in allowed or name.endswith(LOCAL_ENDINGS):
        return
    try:
        ip_address(name)
    except ValueError:
        raise OtherHost(name[:MAX_SHOWN]) from None


def check_origin(scope: Any, allowed: Collection[str]) -> None:
    """Raises OtherOrigin unless the page is the server's own or one of `allowed`
    (`--cors-allow-origin`)."""
    headers = first_fields(scope)
    origin = headers.get(b"origin")
    if origin is None:
        may_pass = headers.get(b"sec-fetch-site", b"none") in OWN
    elif origin.partition(b"://")[2] == headers.get(b"host"):
        may_pass = True
    else:
        may_pass = "*" in allowed or origin.decode("latin-1") in allowed
    if not may_pass:
        raise OtherOrigin
