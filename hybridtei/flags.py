"""Settings structs <-> flags and environment: names, types, bounds and help are read off the fields.

Rules are TEI's: every flag has a variable of its name in upper snake case; the flag wins; an empty variable is a value, and
refused for numbers and booleans; a boolean flag may stand bare.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

S = TypeVar("S", bound=msgspec.Struct)
BOOLEANS = {"true": True, "false": False}


class UsageError(Exception):
    """A flag or variable with a value it cannot have."""


def add_flags(
    parser: argparse.ArgumentParser, kind: type[msgspec.Struct], title: str, *, repeatable: Collection[str] = ()
) -> None:
    """One flag a field, all without default: what is absent is looked for in the environment. `repeatable`: fields whose flags
    may be given more than once, and come as lists."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        plain, meta = _unwrap(hints[field.name])
        names = [_flag(field.name), *(["-p"] if field.name == "port" else [])]
        help_text = f"{meta.description or ''}{_shown_default(field)} [env: {field.name.upper()}]"
        options: dict[str, Any] = {"dest": field.name, "help": help_text.replace("%", "%%"), "default": None}
        if plain is bool:
            options |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        elif get_origin(plain) is tuple or field.name in repeatable:
            options |= {"action": "append", "metavar": "VALUE"}
        else:
            options["metavar"] = _metavar(plain)
        group.add_argument(*names, **options)


def boolean_flags(*kinds: type[msgspec.Struct]) -> frozenset[str]:
    """The flags that may stand bare."""
    return frozenset(
        _flag(name)
        for kind in kinds
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        if _unwrap(hint)[0] is bool
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def from_flags(kind: type[S], given: Mapping[str, Any], environment: Mapping[str, str]) -> S:
    """A struct from flags over environment over defaults. Raises UsageError, naming the flag and what it may be."""
    hints = typing.get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        flag, variable = _flag(field.name), field.name.upper()
        text = given.get(field.name)
        source = flag if text is not None else variable
        text = environment.get(variable) if text is None else text
        if text is not None:
            values[field.name] = _value(text, hints[field.name], source)
    return kind(**values)


def _value(text: str | list[str], hint: Any, source: str) -> Any:
    plain, meta = _unwrap(hint)
    if get_origin(plain) is tuple:
        return tuple([text] if isinstance(text, str) else text)
    assert isinstance(text, str)
    try:
        value: Any = _parsed(text, plain)
        return msgspec.convert(value, typing.Annotated[plain, meta], strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{source}: invalid value {text!r}: {error}") from None


def _parsed(text: str, plain: Any) -> Any:
    if plain is bool:
        if text not in BOOLEANS:
            raise ValueError("should be true or false")
        return BOOLEANS[text]
    return plain(text) if plain in (int, float) else text


def _unwrap(hint: Any) -> tuple[Any, Meta]:
    """A field's annotation -> (type without None, its Meta, bounds of nested annotations merged in)."""
    known: dict[str, Any] = {}
    while True:
        if get_origin(hint) is typing.Annotated:
            hint, *metas = get_args(hint)
            for meta in metas:
                known = {**_set_fields(meta), **known}
        elif get_origin(hint) in (types.UnionType, typing.Union):
            hint = next(part for part in get_args(hint) if part is not type(None))
        else:
            return hint, Meta(**known)


def _set_fields(meta: Meta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in ("ge", "le", "gt", "lt", "description") if getattr(meta, name) is not None}


def _metavar(plain: Any) -> str:
    if get_origin(plain) is typing.Literal:
        return "{" + ",".join(get_args(plain)) + "}"
    return {int: "N", float: "SECONDS"}.get(plain, "TEXT")


def _shown_default(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if default in (None, (), msgspec.NODEFAULT):
        return ""
    return f" [default: {str(default).lower() if isinstance(default, bool) else default}]"
