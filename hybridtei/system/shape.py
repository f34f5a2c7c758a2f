"""msgspec's errors in the words of those who sent the value: where, what was expected, what was
found."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, inspect

PLACE = re.compile(r"(?:key in )?\$\.?([^`]*)`")
# Characters of a message, which may quote a value of megabytes
MAX_MESSAGE = 1_000
STEP = re.compile(r"\w+|\[[\d.]+\]")
OURS = {
    "Object missing required": "missing",
    "Object contains unknown": "unknown",
    "Invalid enum value": "got",
}
# By the type of a place in them
CONTAINERS = {str: dict[str, Raw], int: list[Raw]}
type_of = cache(inspect.type_info)


class Mistake(NamedTuple):
    """What is wrong at `path`, which is empty for the whole value. `value`: what is there, if it
    can be read. `remark`: what a message says of it, unless `text` does. `is_syntax`: serde would
    not have read it."""

    path: str
    text: str
    value: str
    remark: str
    is_syntax: bool

    def __str__(self) -> str:
        words = [self.text, self.remark]
        # Names come last, since they may be many
        if self.text.startswith("expected one"):
            words.reverse()
        return ": ".join(filter(None, [self.path, ", ".join(filter(None, words))]))


def explain(error: msgspec.ValidationError, whole: Any, kind: Any) -> Mistake:
    """Read the error of converting `whole`, JSON in bytes or objects, to `kind`."""
    text, _, end = str(error).rpartition(" - at `")
    place = PLACE.fullmatch(end)
    path = ""
    if place is None:
        text = str(error)
    else:
        path = place[1]
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}…"
    for theirs, ours in OURS.items():
        if text.startswith(theirs):
            text = ours + text.removeprefix(theirs)
    steps = STEP.findall(path)
    types = types_at(type_of(kind), steps)
    is_enumeration = {type(allowed) for allowed in types} - {inspect.NoneType} == {
        inspect.LiteralType
    }
    value = remark = ""
    with suppress(msgspec.DecodeError, UnicodeError, RecursionError, LookupError, ValueError):
        value = _value_at(whole, steps)
    is_syntax = text.endswith("out of range")
    if text.startswith("unknown"):
        text += ", " + _one_of(
            field.encode_name
            for allowed in types
            if isinstance(allowed, inspect.StructType)
            for field in allowed.fields
        )
    elif text.startswith("got") or (is_enumeration and ", got " in text):
        is_syntax = not text.startswith("got")
        remark = text[text.index("got ") :]
        literals = [allowed for allowed in types if isinstance(allowed, inspect.LiteralType)]
        text = _one_of(name for literal in literals for name in literal.values)
    elif value and text.startswith("Expected") and ", got " not in text:
        remark = f"got {value}"
    return Mistake(
        path,
        text[0].lower() + text[1:],
        value,
        remark,
        is_syntax,
    )


def _one_of(names: Iterable[Any]) -> str:
    return f"expected one of {', '.join(f'`{name}`' for name in names)}"


def _value_at(value: Any, steps: Sequence[str]) -> str:
    """The value at these steps of a path, shortened: as JSON, or as Python shows it."""
    for step in steps:
        place: Any = step
        if step.startswith("["):
            place = int(step[1:-1])
        if isinstance(value, bytes | Raw):
            value = msgspec.json.decode(value, type=CONTAINERS[type(place)])
        value = value[place]
    if isinstance(value, bytes | Raw):
        return reprlib.repr(bytes(value).decode())[1:-1]
    return reprlib.repr(value)


def under(field: str, path: str) -> str:
    """The path of what stands at `path` of a field."""
    return f"{field}.{path}".replace(".[", "[", 1).removesuffix(".")


def types_at(kind: inspect.Type, steps: Sequence[str]) -> list[inspect.Type]:
    """The types that `kind` allows at these steps of a path: several for a union."""
    if isinstance(kind, inspect.Metadata):
        return types_at(kind.type, steps)
    if isinstance(kind, inspect.UnionType):
        return [inner for member in kind.types for inner in types_at(member, steps)]
    if not steps:
        return [kind]
    if isinstance(kind, inspect.StructType):
        return [
            inner
            for field in kind.fields
            if field.encode_name == steps[0]
            for inner in types_at(field.type, steps[1:])
        ]
    return types_at(kind.item_type, steps[1:]) if isinstance(kind, inspect.ListType) else []
