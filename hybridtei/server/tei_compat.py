"""Why a body does not fit a route, in TEI's words and with TEI's places: `texts[0]: invalid type: integer `1`, …`.

Clients show these words, and some look for them. Only short bodies that msgspec refused are read here, in Python; the errors
of longer ones have msgspec's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from hybridtei.server.tei_json import JsonReader, Mistake

MAX_BYTES = 4_096  # bytes, which take some milliseconds of the event loop

Expect = Callable[[JsonReader], object]
PREDICT_FORMS = (
    "a string, a pair of strings [string, string] or a batch of mixed strings and pairs [[string], [string, string], ...]"
)
# TEI's structs may come as arrays, too: how many elements each has. Ours have more fields, behind those.
ELEMENTS: Mapping[str, int] = {
    **{"EmbedRequest": 6, "EmbedAllRequest": 4, "EmbedSparseRequest": 4, "OpenAICompatRequest": 5, "PredictRequest": 4},
    **{"RerankRequest": 6, "SimilarityRequest": 2, "SimilarityInput": 2, "SimilarityParameters": 3},
    **{"TokenizeRequest": 3, "DecodeRequest": 2, "VertexRequest": 1},
}


def mistake_in(body: bytes, kind: Any) -> Mistake | None:
    """The first, or None: where the body is too long or too deep to be looked at, or is wrong by a rule that TEI has not."""
    if len(body) > MAX_BYTES:
        return None
    reader = JsonReader(body)
    try:
        _expected(kind)(reader)
    except Mistake as mistake:
        mistake.at = reader.at if mistake.at is None else mistake.at
        return mistake
    except RecursionError:
        return None
    return None


def describe(mistake: Mistake, body: bytes) -> str:
    """The mistake as `path: message at line L column C`."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in mistake.path).removeprefix(".")
    before = body[: mistake.at]
    line, column = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1)
    where = f"{path}: " if path else ""
    return f"{where}{mistake.message} at line {line} column {column}"


@cache
def _expected(kind: Any) -> Expect:
    """A function that reads a value of a type, and raises Mistake for any other."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return partial(_struct, kind)
    if get_origin(kind) is Literal:
        return partial(_variant, get_args(kind))
    if get_origin(kind) is list:
        return partial(_list, _expected(get_args(kind)[0]))
    if get_origin(kind) in (Union, UnionType):
        others = [one for one in get_args(kind) if one not in (NoneType, msgspec.UnsetType)]
        if len(others) == 1:
            expect = _expected(others[0])
            return partial(_optional, expect) if NoneType in get_args(kind) else expect
    return {str: _string, bool: _boolean, int: _size}.get(kind, JsonReader.value)


def _optional(expect: Expect, reader: JsonReader) -> None:
    if reader.peek() == b"n":
        reader.scalar()
    else:
        expect(reader)


def _string(reader: JsonReader) -> None:
    if reader.peek() != b'"':
        raise _wrong(reader, "a string")
    reader.string()


def _boolean(reader: JsonReader) -> None:
    if reader.peek() not in (b"t", b"f"):
        raise _wrong(reader, "a boolean")
    reader.scalar()


def _size(reader: JsonReader) -> None:
    if reader.peek() != b"-" and not reader.peek().isdigit():
        raise _wrong(reader, "usize")
    number = reader.scalar()
    if isinstance(number, float) or number < 0:
        what = "type" if isinstance(number, float) else "value"
        raise _shape(f"invalid {what}: {_shown(number)}, expected usize", reader.at)


def _variant(names: tuple[str, ...], reader: JsonReader) -> None:
    if reader.peek() != b'"':
        raise reader.ahead("expected value" if reader.peek() else "EOF while parsing a value")
    variant = reader.string()
    if variant not in names:
        listed = (
            " or ".join(f"`{name}`" for name in names)
            if len(names) < 3
            else "one of " + ", ".join(f"`{name}`" for name in names)
        )
        raise _shape(f"unknown variant `{variant}`, expected {listed}", reader.at)


def _list(expect: Expect, reader: JsonReader) -> None:
    if reader.peek() != b"[":
        raise _wrong(reader, "a sequence")
    reader.array(lambda _: expect(reader))


def _struct(kind: type, reader: JsonReader) -> None:
    if reader.peek() == b"[" and kind.__name__ in ELEMENTS:
        _struct_of_array(kind, reader)
        return
    if reader.peek() != b"{":
        raise _wrong(reader, f"struct {kind.__name__}")
    fields, seen = _fields(kind), set[str]()

    def entry(key: str) -> None:
        expect = fields.get(key)
        _ = reader.value() if expect is None else expect(reader)

    reader.at += 1
    try:
        _entries(reader, fields, seen, entry, closed=kind.__struct_config__.forbid_unknown_fields)  # type: ignore[attr-defined]
        for field in msgspec.structs.fields(kind):
            if field.required and field.encode_name not in seen:
                raise _shape(f"missing field `{field.encode_name}`")
    except Mistake as mistake:
        reader.leave(mistake, b"}")
    reader.at += 1


def _entries(
    reader: JsonReader, fields: Mapping[str, Expect], seen: set[str], entry: Callable[[str], None], *, closed: bool
) -> None:
    """`closed`: other fields are refused."""
    while reader.more_keys(first=not seen):
        key = reader.string()
        if key in fields and key in seen:
            raise _shape(f"duplicate field `{key}`")
        if closed and key not in fields:
            raise _shape(f"unknown field `{key}`, expected one of {', '.join(f'`{name}`' for name in fields)}", reader.at)
        seen.add(key)
        reader.colon()
        try:
            entry(key)
        except Mistake as mistake:
            raise mistake.below(key) from None


def _struct_of_array(kind: type, reader: JsonReader) -> None:
    expects = [*_fields(kind).values()][: ELEMENTS[kind.__name__]]
    reader.at += 1
    try:
        for place, expect in enumerate(expects):
            if not reader.more_items(place):
                raise _shape(f"invalid length {place}, expected struct {kind.__name__} with {len(expects)} elements")
            try:
                expect(reader)
            except Mistake as mistake:
                raise mistake.below(place) from None
    except Mistake as mistake:
        reader.leave(mistake, b"]")


@cache
def _fields(kind: type) -> Mapping[str, Expect]:
    types = get_type_hints(kind, include_extras=True)
    special = UNTAGGED.get(kind.__name__, {})
    found: dict[str, Expect] = {}
    for field in msgspec.structs.fields(kind):
        found[field.encode_name] = special.get(field.encode_name) or _expected(types[field.name])
    return found


def _untagged(name: str, fits: Callable[[Any], bool], reader: JsonReader) -> None:
    if not fits(reader.value()):
        raise _shape(f"data did not match any variant of untagged enum {name}")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _all(fits: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_input(value: Any) -> bool:
    return _is_string(value) or _all(_is_id, value) or _all(lambda one: _is_string(one) or _all(_is_id, one), value)


def _is_openai_input(value: Any) -> bool:
    """Jina's clients wrap each text in an object; msgspec knows what is wrong with these."""
    return (isinstance(value, list) and any(isinstance(one, tuple) for one in value)) or _is_input(value)


def _is_spanned_input(value: Any) -> bool:
    """A text with spans is an object, too."""
    return isinstance(value, tuple) or _is_openai_input(value)


def _is_texts(value: Any) -> bool:
    return _is_string(value) or _all(_is_string, value)


def _is_ids(value: Any) -> bool:
    return _all(_is_id, value) or _all(partial(_all, _is_id), value)


def _predict(reader: JsonReader) -> None:
    """A text, a list of one or two, or a list of such lists; the first element tells which."""
    if reader.peek() == b'"':
        reader.string()
        return
    if reader.peek() != b"[":
        raise _wrong(reader, PREDICT_FORMS)
    forms: list[Expect] = []
    lengths: list[int] = []

    def item(place: int) -> None:
        if place == 0:
            first = reader.value()
            if not _is_texts(first):
                raise _shape("data did not match any variant of untagged enum Internal")
            forms.append(_string if isinstance(first, str) else partial(_list, _string))
            lengths.append(1 if isinstance(first, str) else len(first))
        elif forms[0] is _string:
            _string(reader)
            lengths[0] += 1
        else:
            before = reader.at
            forms[0](reader)
            lengths.append(len(JsonReader(reader.data[before : reader.at]).value()))

    reader.at += 1
    try:
        place = 0
        while reader.more_items(place):
            try:
                item(place)
            except Mistake as mistake:
                raise mistake.below(place) from None
            place += 1
        for length in lengths or [0]:
            if length not in (1, 2):
                raise _shape(f"invalid length {length}, expected {PREDICT_FORMS}")
    except Mistake as mistake:
        reader.leave(mistake, b"]")
    reader.at += 1


_INPUT = partial(_untagged, "Input", _is_input)
UNTAGGED: Mapping[str, Mapping[str, Expect]] = {
    **{name: {"inputs": _INPUT} for name in ("EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest")},
    **{
        name: {"inputs": partial(_untagged, "Input", _is_spanned_input)}
        for name in ("EmbedHybridRequest", "EmbedMultivectorRequest")
    },
    "OpenAICompatRequest": {"input": partial(_untagged, "Input", _is_openai_input)},
    "TokenizeRequest": {"inputs": partial(_untagged, "TokenizeInput", _is_texts)},
    "DecodeRequest": {"ids": partial(_untagged, "InputIds", _is_ids)},
    "PredictRequest": {"inputs": _predict},
}


def _shape(message: str, at: int | None = None) -> Mistake:
    """A mistake without a place, which becomes the end of the object or array around it."""
    return Mistake(message, at, is_syntax=False)


def _wrong(reader: JsonReader, expected: str) -> Mistake:
    """Of a value of another type. Arrays and objects are not read for it; a value that is no JSON is told first."""
    first = reader.peek()
    if first == b"[":
        kind = "sequence"
    elif first == b"{":
        kind = "map"
    else:
        kind = _shown(reader.value())
    return _shape(f"invalid type: {kind}, expected {expected}", reader.at)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        digits = format(Decimal(repr(value)), "f")
        return f"floating point `{digits if '.' in digits else digits + '.0'}`"
    return f"string {json.dumps(value, ensure_ascii=False)}"
