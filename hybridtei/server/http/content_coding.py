"""How bodies travel: compressed or not, as JSON or as MessagePack, as the headers of a request say.

A body that comes compressed is held to the payload limit while it unfolds, so that a small one cannot become a large one.
Answers are compressed where it pays. Offers of gzip are not: every HTTP library makes them, wanted or not, and to squeeze
one vector takes as long as all else that is done for it. So gzip begins with larger bodies than zstd, which is asked for.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hybridtei.server.http.writers import to_json, to_msgpack

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZSTD_FROM_BYTES = 1024
GZIP_FROM_BYTES = 8192
ZSTD_LEVEL = GZIP_LEVEL = 1
WINDOW_LOG_MOST = 23  # 8 MB, what RFC 8878 asks of every decoder; more is memory for a sender's whim
MOST_PARTS = 16  # each is copied out of the rest, so that thousands would take minutes
JSON_TYPES = frozenset({"application/json", "application/*", "*/*"})
MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
JSON, MSGPACK = b"application/json", b"application/msgpack"


class BrokenCoding(Exception):
    """Bytes that are not what their coding says."""


class TooLong(Exception):
    """More bytes come out than are allowed."""


class UnknownCoding(Exception):
    """A coding that is not read here."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is to be written."""

    msgpack: bool = False
    coding: str | None = None


PLAIN = Form()
FORM: ContextVar[Form] = ContextVar("form", default=PLAIN)  # of the answer to the request at work


def wanted_form(accept: bytes | None, accept_encoding: bytes | None) -> Form:
    """What two headers ask for. Both are given by few, and mostly the same."""
    return PLAIN if accept is None and accept_encoding is None else _wanted_form(accept or b"", accept_encoding or b"")


@lru_cache(maxsize=256)
def _wanted_form(accept: bytes, accept_encoding: bytes) -> Form:
    codings = _qualities(accept_encoding)
    coding = max(("zstd", "gzip"), key=lambda name: codings.get(name, 0.0))
    return Form(_prefers_msgpack(_qualities(accept)), coding if codings.get(coding, 0.0) > 0 else None)


def _qualities(value: bytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in value.decode("latin-1").lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            found.setdefault(name, float(quality))
        except ValueError:
            found.setdefault(name, 0.0)
    return found


def _prefers_msgpack(types: Mapping[str, float]) -> bool:
    """Only where it is named before JSON, or valued more."""
    named = {name: (quality, -place) for place, (name, quality) in enumerate(types.items())}
    packed = max((named[name] for name in MSGPACK_TYPES & named.keys()), default=None)
    plain = max((named[name] for name in JSON_TYPES & named.keys()), default=(0.0, 0))
    return packed is not None and packed[0] > 0 and packed > plain


def written(answer: Any, form: Form) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """An answer's body, and the headers that say what it is."""
    body = to_msgpack(answer) if form.msgpack else to_json(answer)
    headers = [(b"content-type", MSGPACK if form.msgpack else JSON)]
    if form.coding is not None and len(body) >= (ZSTD_FROM_BYTES if form.coding == "zstd" else GZIP_FROM_BYTES):
        body = _compressed(body, form.coding)
        headers.append((b"content-encoding", form.coding.encode()))
    headers.append((b"content-length", b"%d" % len(body)))
    return body, headers


def _compressed(body: bytes, coding: str) -> bytes:
    if coding == "zstd":
        return zstd.compress(body, ZSTD_LEVEL)
    squeezing = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return squeezing.compress(body) + squeezing.flush()


def unfolded(body: bytes, codings: str, limit: int) -> bytes:
    """A body as it was before `content-encoding`. Raises TooLong, BrokenCoding or UnknownCoding."""
    names = [name.strip().lower() for name in codings.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > 1 or any(name not in _START for name in names):
        raise UnknownCoding(codings)
    for name in names:
        body = _unfold(body, limit, _START[name])
    return body


def _unfold(body: bytes, limit: int, start: Callable[[], Any]) -> bytes:
    parts: list[bytes] = []
    size = 0
    while body:
        if len(parts) == MOST_PARTS:
            raise BrokenCoding(f"more than {MOST_PARTS} streams in one body")
        opened = start()
        try:
            part = opened.decompress(body, limit + 1 - size)
        except (zlib.error, zstd.ZstdError) as error:
            raise BrokenCoding(str(error)) from None
        size += len(part)
        if size > limit:
            raise TooLong
        if not opened.eof:
            raise BrokenCoding("incomplete stream")
        parts.append(part)
        body = opened.unused_data
    return b"".join(parts)


def _gzip() -> Any:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _zstd() -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MOST})


_START: Mapping[str, Callable[[], Any]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
