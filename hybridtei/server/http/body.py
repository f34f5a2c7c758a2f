"""Reading of request bodies. Refusals come in TEI's order: content type, size, syntax, shape. `decoding` makes the structs.

These errors are plain text on every route.

A request without a key in its head may have the key in its body, so the server reads the body before it knows the client.
The total bytes of such bodies and the time of each are bounded. A body that arrives whole with its head, as most do, is not
counted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from hybridtei.server.http.connection import BROKEN_BODY, SLOW_BODY, ClientDisconnected

JSON_TYPE = re.compile(rb"application/(json|[^;\s]+\+json)\s*(;|$)", re.IGNORECASE)
PART_BYTES = 1_000_000  # the size of a part
DRAIN_FACTOR = 8  # times the limit: so far an oversized body is read, so that its sender reads the answer


class BodyError(Exception):
    """A body that was refused before a handler ran."""

    status = 400
    prefix = ""
    limit: str | None = None  # the setting of the reached bound, if any

    def __init__(self, detail: str = "") -> None:
        super().__init__(self.prefix + detail)
        self.detail = detail


class ContentTypeError(BodyError):
    """The content type is not JSON."""

    status = 415
    prefix = "Expected request with `Content-Type: application/json`"


class PayloadTooLarge(BodyError):
    """The body is larger than `--payload-limit`."""

    status = 413
    prefix = "Failed to buffer the request body: length limit exceeded"
    limit = "payload_limit"


class BrokenBody(BodyError):
    """The body's chunks are malformed."""

    prefix = "Failed to buffer the request body: error reading a body from connection"


class SlowBody(BodyError):
    """The body arrived too slowly (`--body-timeout`). The connection counts it."""

    status = 408
    prefix = "Failed to buffer the request body: it took too long to arrive (body-timeout)"


class CodingError(BodyError):
    """The body is compressed. Decompression is a proxy's work."""

    status = 415
    prefix = "Expected a body without `content-encoding`. Given: "


class SyntaxRefused(BodyError):
    """The body is not JSON."""

    prefix = "Failed to parse the request body as JSON: "


class SchemaError(BodyError):
    """The JSON has another shape than the route's struct."""

    status = 422
    prefix = "Failed to deserialize the JSON body into the target type: "


FIELDS = "hybridtei.fields"  # in a scope


def first_fields(scope: Any) -> Mapping[bytes, bytes]:
    """A request's headers by lower-case name, the first of each name. Made once a request."""
    fields: Mapping[bytes, bytes] | None = scope.get(FIELDS)
    if fields is None:
        fields = scope[FIELDS] = dict(reversed(scope["headers"]))
    return fields


async def read_body(scope: Any, receive: Any, *, limit: int, type_required: bool = True) -> bytes:
    """Read the body. Raises BodyError, ClientDisconnected."""
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
    """Yield a body of any size in parts of about `PART_BYTES`. Raises BodyError, ClientDisconnected."""
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
    """The next bytes of a body, and True if more follow. Raises BrokenBody, SlowBody, ClientDisconnected."""
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
    """The bodies without a key in a header have reached their total bound."""

    status = 503
    prefix = (
        "Failed to buffer the request body: too much is on its way without a key in a header; send one, or try again later: "
    )


class Keyless:
    """Counts the `bytes` held of bodies without a key in a header. For one event loop."""

    def __init__(self) -> None:
        self.bytes = 0

    @asynccontextmanager
    async def bounded(self, receive: Receive) -> AsyncIterator[Receive]:
        """Yield a replacement of `receive` that reads one body within the bounds. Raises KeylessBodies, SlowBody."""
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
