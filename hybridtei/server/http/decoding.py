"""The bytes of a body -> a struct, with TEI's words for what is wrong.

TEI ignores bytes after the JSON value, and refuses a known field that stands twice, which no fast JSON library reports.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import UNSET, UnsetType

from hybridtei.server.http.body import BodyError, SchemaError, SyntaxRefused
from hybridtei.server.tei_compat import MAX_BYTES, describe, mistake_in

NOT_NULL = ("truncation_direction", "encoding_format")
SURROGATE = re.compile(rb"\\u[dD][89abAB]")
TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
LONG_BYTES = 100_000  # of a body whose decoding garbage collection would interrupt
MAX_NAMES = 10_000  # keys of an object among which a field given twice is looked for

T = TypeVar("T")


class _Named(msgspec.Struct):
    model: Any = None


def model_name(body: bytes, request: Any) -> str | None:
    """The model that a request names, if it does: in its struct, or in the body where the struct has no such field."""
    name: Any = getattr(request, "model", UNSET)
    if name is UNSET:
        if not may_hold(body, "model"):
            return None
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
    return name if isinstance(name, str) else None


def decode(body: bytes, kind: type[T]) -> T:
    """JSON -> `kind`. Raises SyntaxRefused or SchemaError."""
    try:
        value = _counted(body, kind) or _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _mistake(body, kind) or _refusal(str(error)) from None
    except SchemaError as error:
        raise _mistake(body, kind) or error from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _mistake(body, kind) or SyntaxRefused(_syntax_detail(str(error), body)) from None
    _refuse_duplicates(body, kind)
    return value


def decode_by_field(body: bytes, field: str, kind: type[T], others: Mapping[str, type[Any]]) -> T | Any:
    """JSON -> `kind` if it has `field`; else the first of `others` whose field it has; `kind` if there is none of these.

    `others`: a field that a struct requires -> the struct. A body is decoded once, unless several of these names stand in it,
    or it is refused. Raises SyntaxRefused or SchemaError.
    """
    possible = [name for name in others if may_hold(body, name)]
    if not possible:
        return decode(body, kind)
    if len(possible) == 1 and not may_hold(body, field):
        request = _decoded_if_fits(body, others[possible[0]])
        if request is not None:  # and so it has the field
            return request
    fields = keys_of(body, _fields_struct(field, *others))
    if getattr(fields, field) is not UNSET:
        return decode(body, kind)
    return decode(body, next((others[name] for name in others if getattr(fields, name) is not UNSET), kind))


def may_hold(body: bytes, name: str) -> bool:
    """Whether an object in a body may have a field of this name. False is certain, and found without decoding."""
    return b'"%b"' % name.encode() in body or b"\\u00" in body


def keys_of(body: bytes, kind: type[T]) -> T:
    """Which fields of `kind`, all optional, a body has: to choose what to decode it as, which then tells what is wrong."""
    try:
        return _decode(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return kind()


def _decoded_if_fits(body: bytes, kind: type[T]) -> T | None:
    try:
        request = _decode(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, SchemaError):
        return None
    _refuse_duplicates(body, kind)
    return request


@cache
def _fields_struct(*names: str) -> type[msgspec.Struct]:
    """A struct of these fields, all optional and undecoded."""
    return msgspec.defstruct("Fields", [(name, msgspec.Raw | UnsetType, UNSET) for name in names], frozen=True)


def _mistake(body: bytes, kind: type) -> BodyError | None:
    """The error in TEI's words; None where its reader finds no mistake."""
    mistake = mistake_in(body, kind)
    if mistake is None:
        return None
    return (SyntaxRefused if mistake.is_syntax else SchemaError)(describe(mistake, body), mistake.message)


class _Inputs(msgspec.Struct):
    inputs: list[msgspec.Raw]


def _counted(body: bytes, kind: type[T]) -> T | None:
    """A request that stands for more than `kind.max_lists` inputs: to count these takes a third of the time of decoding."""
    of_many = getattr(kind, "of_many", None)
    if of_many is None or body.count(b"[") <= kind.max_lists:  # type: ignore[attr-defined]
        return None
    try:
        inputs = len(_decode(body, _Inputs).inputs)
    except msgspec.ValidationError:
        return None
    return of_many(inputs) if inputs > kind.max_lists else None  # type: ignore[attr-defined]


def _decode(body: bytes, kind: type[T]) -> T:
    with _uncollected() if len(body) > LONG_BYTES and gc.isenabled() else nullcontext():
        return _without_trailing(_decoder(kind), body)  # type: ignore[no-any-return, arg-type]


def _without_trailing(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        trailing = TRAILING.search(str(error))
        if trailing is None:
            raise
        return decoder.decode(body[: int(trailing[1]) - 1])


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which a body of many lists would set off again and again, and which finds nothing there."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _refusal(message: str) -> BodyError:
    """msgspec's `message - at `$.path`` -> TEI's `path: message`; null for an enumeration is a syntax error there."""
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    detail = f"{path}: {text}" if path else text
    is_null = text.endswith("got `null`") and path.rpartition(".")[2] in NOT_NULL
    return SyntaxRefused(detail) if is_null or text.endswith("out of range") else SchemaError(detail)


def _syntax_detail(message: str, body: bytes) -> str:
    """msgspec takes half a surrogate pair for a truncated body; say what it is."""
    return "lone surrogate in hex escape" if "truncated" in message and SURROGATE.search(body) else message


def _refuse_duplicates(body: bytes, kind: type) -> None:
    names = _field_names(kind)
    if not names:
        return
    if b"\\u00" not in body and all(body.count(name) < 2 for name in names.values()):
        return  # no name stands there twice, nor spelled with escapes
    error = _mistake(body, kind)
    if error is not None:
        raise error
    if len(body) > MAX_BYTES:
        _refuse_twice(body, kind)


class _Name(str):
    """A key of an object, so that the decoder calls its hook for each."""


class _EnoughNames(Exception):
    """An object has more than MAX_NAMES keys; to look for a duplicate would hold up other requests."""


def _refuse_twice(body: bytes, kind: type) -> None:
    """Raise SchemaError if an object gives a field of `kind` twice, or of a struct that is the value of one. msgspec shows
    each key, and skips over the values."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    seen: list[str] = []
    names = 0

    def see(_: type, name: str) -> _Name:
        nonlocal names
        if name in fields and name in seen:
            raise SchemaError(f"duplicate field `{name}`")
        if name in fields:
            seen.append(name)
        names += 1
        if names > MAX_NAMES:
            raise _EnoughNames
        return _Name(name)

    try:
        values = _without_trailing(msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=see), body)
    except _EnoughNames:
        return
    for name, field in fields.items():
        for part in (field.type, *get_args(field.type)):
            value = bytes(values.get(_Name(name), b""))
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and value.startswith(b"{"):
                _refuse_twice(value, part)


@cache
def _field_names(kind: Any) -> dict[str, bytes]:
    """Each field's name, those of structs within included -> the same as it stands in JSON."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {}
    names: dict[str, bytes] = {}
    for field in msgspec.structs.fields(kind):
        names[field.encode_name] = f'"{field.encode_name}"'.encode()
        for part in (field.type, *get_args(field.type)):
            names |= _field_names(part)
    return names
