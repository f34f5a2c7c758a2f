"""A request's body: read within bounds, then decoded to a struct, or refused in one sentence: the
field's path, the value, and the expected type. Refusals come in TEI's order: content type, size,
syntax, shape. They are plain text on every route.

A scope's extensions tell whether the client disconnected, and whether its body can still arrive.
ASGI reports a disconnect only in `receive`, which a computing handler does not await.

msgspec decodes and checks. This module adds three rules of TEI: bytes after the JSON value are
ignored, a duplicate field is refused, and an enumeration's value that is not a string is a syntax
error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from json import detect_encoding
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from msgspec import UNSET, Raw, inspect

from hybridtei.limits import MAX_ESCAPES, MAX_VALUES, Bound, Holder
from hybridtei.system.shape import explain, type_of, types_at

# In a scope's extensions: the rest of the body will not come, but the client listens; the body came
# too slowly; a Disconnect; no permit was free.
BROKEN_BODY, SLOW_BODY, DISCONNECT = (
    "hybridtei.broken_body",
    "hybridtei.slow_body",
    "hybridtei.disconnect",
)
REFUSED = "hybridtei.refused"


class ClientDisconnected(Exception):
    """The client disconnected, and needs no answer."""


class Disconnect:
    """`happened` is True once the client has disconnected before its answer. A context manager:
    within it, a disconnect cancels the current task, and the cancellation becomes
    ClientDisconnected.

    ASGI servers report a disconnect only in `receive`, so each request would need a second task.
    `BoundedHttpProtocol` calls `notify` instead. Under another server the work continues.
    """

    __slots__ = ("_running", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._running: asyncio.Task[Any] | None = None

    def notify(self) -> None:
        self.happened = True
        if self._running is not None:
            self._running.cancel()

    def __enter__(self) -> None:
        self._running = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        running, self._running = self._running, None
        if self.happened and running is not None and kind is asyncio.CancelledError:
            running.uncancel()
            raise ClientDisconnected from None


def while_connected(scope: Any) -> Disconnect:
    """The disconnect of a request's client, to work within it."""
    return (scope.get("extensions") or {}).get(DISCONNECT) or Disconnect()


JSON_TYPE = re.compile(rb"application/(json|[^;\s]+\+json)\s*(;|$)", re.IGNORECASE)
# The size of a part
PART_BYTES = 1_000_000
# Times the limit: so far an oversized body is read, so that its sender reads the answer
DRAIN_FACTOR = 8
BUFFER = "Failed to buffer the request body: "
SLOW = f"{BUFFER}it took too long to arrive (body-timeout)"


class BodyError(Exception):
    """A body that was refused before a handler ran. `limit`: the setting of the reached bound, if
    any."""

    def __init__(self, text: str, status: int = 400, limit: str | None = None) -> None:
        super().__init__(text)
        self.status, self.limit = status, limit


class SyntaxRefused(BodyError):
    """The body is not JSON."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"Failed to parse the request body as JSON: {detail}")
        self.detail = detail


class SchemaError(BodyError):
    """The JSON has another shape than the route's struct."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"Failed to deserialize the JSON body into the target type: {detail}", 422)
        self.detail = detail


# In a scope
FIELDS = "hybridtei.fields"


def first_fields(scope: Any) -> Mapping[bytes, bytes]:
    """A request's headers by lower-case name, the first of each name. Made once a request."""
    fields: Mapping[bytes, bytes] | None = scope.get(FIELDS)
    if fields is None:
        fields = scope[FIELDS] = dict(reversed(scope["headers"]))
    return fields


def check_type(fields: Mapping[bytes, bytes]) -> None:
    """Raises BodyError unless the content type is JSON."""
    if not JSON_TYPE.match(fields.get(b"content-type", b"").strip()):
        raise BodyError("Expected request with `Content-Type: application/json`", 415)


def check_size(size: int, limit: int) -> None:
    """Raises BodyError above the limit."""
    if size > limit:
        raise BodyError(f"{BUFFER}length limit exceeded", 413, "payload_limit")


# Bytes that are counted before the sum is compared, without a copy of the whole body
WINDOW_BYTES = 1_000_000
MARKS = (b",", b"[", b"{")


def _marks(body: bytes, limit: int, begin: int, end: int) -> int:
    """The marks of values in a part of a body; a number above `limit` may leave some out."""
    total = 0
    while begin < end and total <= limit:
        stop = min(begin + WINDOW_BYTES, end)
        total += sum(body.count(mark, begin, stop) for mark in MARKS)
        begin = stop
    return total


def _outside(plain: bytes, limit: int) -> int:
    """The marks outside of texts. `plain` has no escaped quotes, so of all pieces between quotes
    every second one is a text."""
    total, is_text = 0, False
    for begin in range(0, len(plain), WINDOW_BYTES):
        pieces = plain[begin : begin + WINDOW_BYTES].split(b'"')
        outside = b"".join(pieces[is_text::2])
        total += _marks(outside, limit, 0, len(outside))
        if total > limit:
            break
        # A text may go on in the next window
        is_text ^= len(pieces) % 2 == 0
    return total


def check_values(body: bytes, limit: int = MAX_VALUES) -> None:
    """Raises BodyError for JSON of more than `limit` values: decoding them would delay other
    requests."""
    if _marks(body, limit, 0, len(body)) <= limit:
        return
    escapes, plain = body.count(b"\\"), body
    if escapes <= MAX_ESCAPES:
        if escapes:
            plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') <= 4 * limit and _outside(plain, limit) <= limit:
            return
    raise BodyError(
        f"{BUFFER}it holds more than {limit} values, the most allowed; send fewer inputs a request",
        413,
    )


async def read_body(request: Any, bound: Bound, limit: int, seconds: float, rate: float) -> bytes:
    """Read a request's body. `bound`: of the bytes of all bodies that arrive in several pieces.
    `seconds`: for a small one, and one more for each `rate` bytes. Raises BodyError,
    ClientDisconnected."""
    scope, receive = request.scope, request.receive
    fields = first_fields(scope)
    if b"content-encoding" in fields:
        _check_coding(fields)
    declared = fields.get(b"content-length", b"")
    # Of a body in chunks as much as is allowed
    size = limit
    if declared.isdigit():
        size = int(declared)
    if size > limit * DRAIN_FACTOR:
        check_size(size, limit)
    chunk, more = await _next_chunk(scope, receive)
    if not more:
        # A body that arrives whole with its head waits for nothing, so it is not counted
        check_size(len(chunk), limit)
        return chunk
    allowed = seconds + size / rate
    try:
        with bound.inside(0) as holder:
            return await holder.within(allowed, _joined(scope, receive, holder, chunk, limit))
    except TimeoutError:
        raise BodyError(
            f"{SLOW} within {allowed:g} seconds",
            408,
            "body_timeout",
        ) from None


def too_much_arrives(bound: Bound) -> BodyError:
    """The refusal of a bound of bodies that arrive."""
    return BodyError(
        f"{BUFFER}more than {bound.limit} bytes of bodies arrive, and this one has held most for "
        "longest: send it faster, or try again later",
        503,
    )


async def _joined(scope: Any, receive: Any, arriving: Holder, chunk: bytes, limit: int) -> bytes:
    """The body that begins with `chunk`. The rest of one that is too large is read, within bounds,
    and dropped: its client reads no answer before."""
    chunks: list[bytes] = []
    size, more = 0, True
    while True:
        size += len(chunk)
        if size <= limit:
            arriving.take(len(chunk))
            chunks.append(chunk)
        else:
            chunks.clear()
            arriving.leave()
        if not more or size > limit * DRAIN_FACTOR:
            check_size(size, limit)
            return b"".join(chunks)
        chunk, more = await _next_chunk(scope, receive)


async def body_parts(scope: Any, receive: Any) -> AsyncIterator[bytes]:
    """Yield a body of any size in parts of about `PART_BYTES`. Raises BodyError,
    ClientDisconnected."""
    _check_coding(first_fields(scope))
    part, more = bytearray(), True
    while more:
        chunk, more = await _next_chunk(scope, receive)
        part += chunk
        if len(part) >= PART_BYTES or not more:
            yield bytes(part)
            part.clear()


def _check_coding(fields: Mapping[bytes, bytes]) -> None:
    coding = fields.get(b"content-encoding", b"")
    if coding not in (b"", b"identity"):
        # Decompression is a proxy's work
        named = coding.decode("latin-1")
        raise BodyError(f"Expected a body without `content-encoding`. Given: {named}", 415)


async def _next_chunk(scope: Any, receive: Any) -> tuple[bytes, bool]:
    """The next bytes of a body, and True if more follow. Raises BodyError, ClientDisconnected."""
    event = await receive()
    if BROKEN_BODY in (scope.get("extensions") or ()):
        # The connection has counted this refusal
        if SLOW_BODY in scope["extensions"]:
            raise BodyError(SLOW, 408)
        raise BodyError(f"{BUFFER}error reading a body from connection")
    if event["type"] == "http.disconnect":
        raise ClientDisconnected
    return event.get("body", b""), event.get("more_body", False)


# An object's first keys, which are checked for duplicates
MAX_NAMES = 10_000
TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


# Half of a surrogate pair, unless its backslash is itself escaped
HALF = re.compile(
    rb"\\u(?:(?<!\\\\u)|(?<=[^\\]\\\\\\u))"
    rb"[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F]..)"
)
# Its bytes, and those that may follow
HALF_BYTES = 12
# A body with more is refused: replacing them would delay other requests
MAX_HALVES = 100_000


def decode_peers(body: bytes, kind: type[T]) -> T:
    """As `decode`, for APIs of other servers than TEI.

    Half a surrogate pair, as JavaScript splits texts, is U+FFFD. A null is an absent field, if the
    field may be absent. "256" and 256.0 are 256. UTF-16 and byte-order marks are read.
    """
    try:
        return decode(body, kind)
    except (SyntaxRefused, SchemaError):
        repaired = _without_nulls(_as_utf8(body), kind)
    return decode(repaired, kind, strict=False)


def _as_utf8(body: bytes) -> bytes:
    """Raises SyntaxRefused for what is not UTF-16 or UTF-32: replacing it takes seconds, in which
    no other thread runs."""
    encoding = detect_encoding(body)
    if encoding != "utf-8":
        try:
            body = body.decode(encoding).encode()
        except UnicodeError as error:
            raise SyntaxRefused(f"it is not {encoding}: {error}") from None
    parts: list[bytes] = []
    begin = 0
    for half in islice(_halves(body), MAX_HALVES):
        parts += body[begin : half.start()], b"\\ufffd"
        begin = half.end()
    return b"".join([*parts, body[begin:]]) if parts else body


def _halves(body: bytes) -> Iterator[re.Match[bytes]]:
    """Find halves of surrogate pairs, window by window: other threads run in between."""
    for begin in range(0, len(body), WINDOW_BYTES):
        end = begin + WINDOW_BYTES
        for half in HALF.finditer(body, begin, end + HALF_BYTES):
            if half.start() < end:
                yield half


def _without_nulls(body: bytes, kind: Any) -> bytes:
    """The object without its members that are null, here and in its structs. Raises SchemaError for
    a duplicate field."""
    structs = _fields(kind)
    values: dict[str, Raw] = {}
    for name, value in _members(body, structs).items():
        if bytes(value) == b"null":
            continue
        inner = structs.get(name)
        values[str(name)] = Raw(_without_nulls(bytes(value), inner[0])) if inner else value
    return msgspec.json.encode(values) if values else body


def kind_of(body: bytes, kinds: Mapping[str, type[T]]) -> type[T]:
    """The struct of the first field in the body, else the first struct."""
    fields = keys_of(body, dict[str, Raw]) or keys_of(_as_utf8(body), dict[str, Raw])
    default = next(iter(kinds.values()))
    return next((kind for name, kind in kinds.items() if name in fields), default)


def decode(body: bytes, kind: type[T], *, strict: bool = True) -> T:
    """JSON -> `kind`. `strict`: no text is a number. Raises SyntaxRefused, SchemaError."""
    _refuse_twice(body, kind)
    try:
        return _read(body, kind, strict=strict)
    except msgspec.ValidationError as error:
        mistake = explain(error, body, kind)
        refusal = SyntaxRefused if mistake.is_syntax else SchemaError
        raise refusal(str(mistake)) from None
    except UNREADABLE as error:
        if (end := _end_before_trailing(error)) is None:
            raise SyntaxRefused(_syntax(error, body)) from None
        return decode(body[:end], kind, strict=strict)


# Of several hundred clients, bodies of this size are decoded in a quarter of a second
TURN_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class _Turns:
    """Who decodes on an event loop, and who in a thread beside it."""

    on_loop: asyncio.Lock = field(default_factory=asyncio.Lock)
    in_thread: asyncio.Lock = field(default_factory=asyncio.Lock)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


async def in_turn(body: bytes, step: Callable[..., T], *arguments: object) -> T:
    """Call a step that takes as long as `body` is large: a small one at once, the largest in a
    thread, one after the other, since each of its calls in C keeps all other threads waiting. Of
    those between, one has a turn in each pass of the event loop. So small requests get their
    answers meanwhile, however many clients send large ones."""
    if len(body) <= TURN_BYTES:
        return step(*arguments)
    turns = _turns.setdefault(asyncio.get_running_loop(), _Turns())
    if len(body) > PART_BYTES:
        async with turns.in_thread:
            return await asyncio.to_thread(step, *arguments)
    async with turns.on_loop:
        await asyncio.sleep(0)
        return step(*arguments)


async def decode_in_turn(
    body: bytes, kind: type[T], how: Callable[[bytes, type[T]], T] = decode
) -> T:
    """As `how`, for a function of a route that decodes."""
    return await in_turn(body, how, body, kind)


def keys_of(body: bytes, kind: type[T]) -> T:
    """Decode a body to `kind`, whose fields are all optional. A malformed body gives no fields."""
    try:
        return _read(body, kind)
    except UNREADABLE as error:
        end = _end_before_trailing(error)
        return kind() if end is None else keys_of(body[:end], kind)


class _Named(msgspec.Struct):
    model: Any = None


def model_name(body: bytes, request: Any) -> str | None:
    """The model that a request names, or None: from its struct, or from the body if the struct has
    no `model`."""
    name: Any = getattr(request, "model", UNSET)
    name = keys_of(body, _Named).model if name is UNSET else name
    return name if isinstance(name, str) else None


@cache
def _decoder(kind: Any, *, strict: bool = True) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=strict)


def _read(body: bytes, kind: type[T], *, strict: bool = True) -> T:
    decoder: msgspec.json.Decoder[T] = _decoder(kind, strict=strict)  # type: ignore[arg-type]
    return decoder.decode(body)


def _end_before_trailing(error: Exception) -> int | None:
    trailing = TRAILING.search(str(error))
    return int(trailing[1]) - 1 if trailing else None


def _syntax(error: Exception, body: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"a string is not UTF-8: {error.reason}"
    if isinstance(error, RecursionError):
        return "arrays and objects are nested too deeply"
    if "truncated" not in str(error):
        return str(error).removeprefix("JSON is malformed: ")
    if any(_halves(body)):
        return "half of a surrogate pair"
    return f"it ends too early (byte {len(body)})"


class _Key(str):
    """A key of an object. The decoder calls its hook for each key."""


@cache
def _fields(kind: Any) -> dict[str, list[type]]:
    """Field -> the structs that its value may be. Empty if `kind` is not a struct."""
    fields = [
        field
        for inner in types_at(type_of(kind), ())
        if isinstance(inner, inspect.StructType)
        for field in inner.fields
    ]
    types_of = {field.encode_name: types_at(field.type, ()) for field in fields}
    return {
        name: [inner.cls for inner in types if isinstance(inner, inspect.StructType)]
        for name, types in types_of.items()
    }


def _refuse_twice(body: bytes | Raw, kind: Any, path: str = "") -> None:
    """Raises SchemaError for a duplicate field of `kind`, or of a struct in its fields."""
    fields = _fields(kind)
    for name, value in _members(body, fields, path).items():
        for inner in fields.get(name, ()):
            _refuse_twice(value, inner, f"{path}{name}.")


def _members(body: bytes | Raw, fields: Mapping[str, Any], path: str = "") -> Mapping[_Key, Raw]:
    """The members of an object; none if it has more than MAX_NAMES, or is no object. Raises
    SchemaError for a duplicate of `fields`.

    msgspec skips over the values, which takes half the time of decoding them.
    """
    names: list[str] = []

    def see(_: type, name: str) -> _Key:
        if len(names) == MAX_NAMES:
            # Checking more keys would delay other requests
            raise msgspec.DecodeError
        if name in fields and name in names:
            raise SchemaError(f"duplicate field `{path}{name}`")
        names.append(name)
        return _Key(name)

    try:
        return msgspec.json.Decoder(dict[_Key, Raw], dec_hook=see).decode(body)
    except UNREADABLE:
        # `decode` will report the error
        return {}
