"""The keys that open the server, each with a name: the name is counted and logged, the key never.

Kept are digests of equal length, and a given key is compared with all of them, so that how long it takes tells neither how
long a key is, nor which one came near, nor how many there are before it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from hmac import compare_digest
from pathlib import Path

from hybridtei.config import ServerConfig
from hybridtei.errors import LoadError

FLAG_NAME = "api-key"  # under which the key of `--api-key` is counted
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEYS_MOST, FILE_BYTES_MOST = 1000, 1_000_000

log = logging.getLogger(__name__)


class Keyring:
    """The keys of a server; open to everybody where there is none."""

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        """Raises LoadError, naming the file and the line."""
        self._fixed = {} if key is None else {FLAG_NAME: _digest(key.encode())}
        self._file = file
        self._digests = self._read()

    @classmethod
    def of(cls, server: ServerConfig) -> Keyring:
        """Raises LoadError."""
        return cls(server.api_key, None if server.api_key_file is None else Path(server.api_key_file))

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._fixed and self._file is None

    def owner(self, given: bytes) -> str | None:
        """Name of a key, or None if it is none of these."""
        digest, found = _digest(given), None
        for name, known in self._digests.items():
            if compare_digest(digest, known):
                found = name
        return found

    def owner_of_header(self, value: bytes) -> str | None:
        """Name of the key in `Bearer KEY`, byte for byte."""
        prefix, key = value[:7], value[7:]
        return self.owner(key) if prefix == b"Bearer " else None

    def reload(self) -> None:
        """Read the file again; if that fails, the keys stay as they are, and the log says why."""
        try:
            self._digests = self._read()
        except LoadError as error:
            log.error("the keys stay as they are: %s", error)
        else:
            log.info("read the keys again: %s", ", ".join(self._digests))

    def _read(self) -> Mapping[str, bytes]:
        return self._fixed if self._file is None else {**self._fixed, **read_keys(self._file)}


def read_keys(path: Path) -> dict[str, bytes]:
    """Digests of a file's keys by name. Raises LoadError, naming the line and never what it holds."""
    try:
        if path.stat().st_size > FILE_BYTES_MOST:
            raise LoadError(f"{path}: larger than {FILE_BYTES_MOST} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read as a list of keys: {type(error).__name__}") from None
    found: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            name, key = _entry(line, f"{path}: line {number}")
            if name in found or name == FLAG_NAME:
                raise LoadError(f"{path}: line {number}: a second key called {name}")
            found[name] = _digest(key.encode())
    if not found or len(found) > KEYS_MOST:
        raise LoadError(f"{path}: holds {len(found)} keys; it should hold at least one, and at most {KEYS_MOST}")
    return found


def is_sendable(key: str) -> bool:
    """Whether a header can carry it."""
    return bool(key) and key.strip() == key and key.isascii() and key.isprintable()


def _entry(line: str, where: str) -> tuple[str, str]:
    name, colon, key = line.strip().partition(":")
    if not colon or not NAME.fullmatch(name):
        raise LoadError(f"{where}: should be `NAME:KEY`; a name is 1 to 64 letters, digits, dots, dashes, underscores")
    if not is_sendable(key):
        raise LoadError(f"{where}: no header can carry this key; it should be printable ASCII without a space at either end")
    return name, key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
