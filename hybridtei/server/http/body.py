"""The bytes of a request's body, refused in TEI's order: content type, size, syntax, shape; `decoding` makes a struct of them.

These errors are plain text on every route.

A body is also read if its head carried no key, because the key may stand in the body. Any client can send such bodies, so the
bytes of all of them and the time of each are bounded. A body that comes whole with its head, as most do, is not counted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from hybridtei.server.http.connection import BROKEN_BODY, SLOW_BODY, ClientDisconnected

JSON_TYPE = re.compile(rb"application/(json|[^;\s]+\+json)\s*(;|$)", re.IGNORECASE)
PART_BYTES = 1_000_000  # of a body that is read in parts
DRAIN_FACTOR = 8  # an oversized body is read on, up to so many times the limit, so that its sender hears the answer


class BodyError(Exception):
    """A body that was refused before any handler saw it."""

    status = 400
    prefix = ""
    limit: str | None = None  # the setting whose bound was reached, if it was one

    def __init__(self, detail: str = "") -> None:
        super().__init__(self.prefix + detail)
        self.detail = detail


class ContentTypeError(BodyError):
    """Not JSON, by its content type."""

    status = 415
    prefix = "Expected request with `Content-Type: application/json`"


class PayloadTooLarge(BodyError):
    """More bytes than `--payload-limit`."""

    status = 413
    prefix = "Failed to buffer the request body: length limit exceeded"
    limit = "payload_limit"


class BrokenBody(BodyError):
    """Invalid chunks."""

    prefix = "Failed to buffer the request body: error reading a body from connection"


class SlowBody(BodyError):
    """Bytes that come too slowly: see `--body-timeout`. The connection counts it."""

    status = 408
    prefix = "Failed to buffer the request body: it took too long to arrive (body-timeout)"


class CodingError(BodyError):
    """A compressed body: to decompress it is the work of a proxy."""

    status = 415
    prefix = "Expected a body without `content-encoding`. Given: "


class SyntaxRefused(BodyError):
    """Not JSON."""

    prefix = "Failed to parse the request body as JSON: "


class SchemaError(BodyError):
    """JSON of another shape."""

    status = 422
    prefix = "Failed to deserialize the JSON body into the target type: "


FIELDS = "hybridtei.fields"  # in a scope


def first_fields(scope: Any) -> Mapping[bytes, bytes]:
    """A request's headers by name, in lower case, the first of each; made once a request."""
    fields: Mapping[bytes, bytes] | None = scope.get(FIELDS)
    if fields is None:
        fields = scope[FIELDS] = dict(reversed(scope["headers"]))
    return fields


async def read_body(scope: Any, receive: Any, *, limit: int, type_required: bool = True) -> bytes:
    """The bytes of what should be JSON. Raises BodyError, ClientDisconnected."""
    fields = first_fields(scope)
    content_type = fields.get(b"content-type")
    if type_required if content_type is None else not JSON_TYPE.match(content_type.strip()):
        raise ContentTypeError
    _check_coding(scope)
    declared = fields.get(b"content-length", b"")
    too_large = declared.isdigit() and int(declared) > limit
    if too_large and int(declared) > limit * DRAIN_FACTOR:
        raise PayloadTooLarge
    chunks: list[bytes] = []
    size = 0
    more = True
    while more and size <= limit * DRAIN_FACTOR:
        chunk, more = await _next_chunk(scope, receive)
        size += len(chunk)
        too_large = too_large or size > limit
        if not too_large:
            chunks.append(chunk)
    if too_large:
        raise PayloadTooLarge
    return b"".join(chunks)


async def body_parts(scope: Any, receive: Any) -> AsyncIterator[bytes]:
    """A body of any size as it comes, in parts of about `PART_BYTES`. Raises BodyError, ClientDisconnected."""
    _check_coding(scope)
    part, more = bytearray(), True
    while more:
        chunk, more = await _next_chunk(scope, receive)
        part += chunk
        if len(part) >= PART_BYTES or not more:
            yield bytes(part)
            part.clear()


def _check_coding(scope: Any) -> None:
    coding = first_fields(scope).get(b"content-encoding", b"")
    if coding not in (b"", b"identity"):
        raise CodingError(coding.decode("latin-1"))


async def _next_chunk(scope: Any, receive: Any) -> tuple[bytes, bool]:
    """The next bytes of a body, and whether more come. Raises BrokenBody, SlowBody, ClientDisconnected."""
    event = await receive()
    if BROKEN_BODY in (scope.get("extensions") or ()):
        raise SlowBody if SLOW_BODY in scope["extensions"] else BrokenBody
    if event["type"] == "http.disconnect":
        raise ClientDisconnected
    return event.get("body", b""), event.get("more_body", False)


KEYLESS_BYTES = 16_000_000
KEYLESS_SECONDS = 10.0

Receive = Callable[[], Awaitable[Any]]


class KeylessBodies(BodyError):
    """The limit of bytes of bodies without a key in a header is reached."""

    status = 503
    prefix = (
        "Failed to buffer the request body: too much is on its way without a key in a header; send one, or try again later: "
    )


class Keyless:
    """How many `bytes` are held of such bodies. For one event loop."""

    def __init__(self) -> None:
        self.bytes = 0

    @asynccontextmanager
    async def bounded(self, receive: Receive) -> AsyncIterator[Receive]:
        """Within, one body is read by what this gives in place of `receive`. Raises KeylessBodies, SlowBody."""
        held = 0

        async def receive_bounded() -> Any:
            nonlocal held
            event = await receive()
            if event.get("more_body", False):
                held += len(event["body"])
                self.bytes += len(event["body"])
                if self.bytes > KEYLESS_BYTES:
                    raise KeylessBodies(f"{KEYLESS_BYTES} bytes of all")
            return event

        try:
            async with asyncio.timeout(KEYLESS_SECONDS):
                yield receive_bounded
        except TimeoutError:
            raise SlowBody(f" within {KEYLESS_SECONDS:g} seconds without a key in a header") from None
        finally:
            self.bytes -= held
