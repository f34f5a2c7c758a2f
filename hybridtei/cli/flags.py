"""Settings structs <-> flags and environment: names, types, bounds, headings and help come from the
fields.

The rules are TEI's. Every flag has a variable of its name in upper snake case; the flag overrides
it. An empty variable is a value, which numbers and booleans refuse. A boolean flag may have no
value. Only list flags may be repeated.
"""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from hybridtei.config import EngineConfig, Kind, ModelConfig, ServerConfig, StoreConfig, fields_of
from hybridtei.errors import UsageError

S = TypeVar("S", bound=msgspec.Struct)
SETTINGS = (ModelConfig, EngineConfig, ServerConfig, StoreConfig)
# Argparse has no public name for the result of `add_subparsers`
Commands = Any
BOOLEANS = {"true": True, "false": False}
# Removed flags and variables -> what to do instead. A command that reads models refuses them.
MIRROR = (
    "let a proxy mirror requests (deploy/nginx), and compare recorded ones by `hybridtei compare A "
    "B --from access.jsonl`"
)
RETIRED = {
    **dict.fromkeys(("shadow", "shadow_rate", "shadow_api_key"), MIRROR),
    "http_workers": (
        "one process speaks HTTP; on many cores start several servers, each with --reuse-port "
        "(deploy/scale.md)"
    ),
    "table_under_load": (
        'leave it out; after a 429 a client can send "mode": "sparse" and "query_encoder": "table"'
    ),
    "chunking": "leave it out; for late chunks send `spans` to /embed_hybrid and store the vectors",
    "cuda_devices": (
        "start a server for each GPU, with CUDA_VISIBLE_DEVICES=N and --reuse-port "
        "(notebooks/tuning.md)"
    ),
    **dict.fromkeys(("cuda_graphs", "torch_compile"), "leave it out: it made passes slower"),
}
# A namespace's attribute: the flags read so far
SEEN = "flags_seen"


class _Once(argparse.Action):
    """Stores a value, and rejects a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        seen: set[str] = namespace.__dict__.setdefault(SEEN, set())
        if self.dest in seen:
            raise argparse.ArgumentError(self, "cannot be used multiple times")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


def add_flags(
    parser: argparse.ArgumentParser, kinds: Sequence[Kind], *, repeatable: Collection[str] = ()
) -> None:
    """Add a flag for each field under its heading, without defaults, since `from_flags` also reads
    the environment.
    `repeatable`: fields whose flags may be repeated and make lists."""
    if ModelConfig in kinds:
        for name in RETIRED:
            parser.add_argument(_flag(name), nargs="?", const="", help=argparse.SUPPRESS)
    headings: dict[str, Any] = {}
    for kind in kinds:
        for field, plain, meta in fields_of(kind):
            heading = group_of(kind, meta)
            if heading not in headings:
                headings[heading] = parser.add_argument_group(heading)
            names = [_flag(field.name)]
            if field.name == "port":
                names.append("-p")
            help_text = (
                f"{meta.description or ''}{_shown_default(field)} [env: {field.name.upper()}]"
            )
            options: dict[str, Any] = {"dest": field.name, "default": None, "action": _Once}
            if plain is bool:
                options |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
            elif get_origin(plain) is tuple or field.name in repeatable:
                options |= {"action": "append", "metavar": "VALUE"}
            else:
                options["metavar"] = (meta.extra or {}).get("metavar") or _metavar(plain, meta)
            headings[heading].add_argument(*names, help=help_text.replace("%", "%%"), **options)
            alias = _alias(meta)
            if alias is not None:
                headings[heading].add_argument(
                    _flag(alias), **{**options, "dest": alias, "help": argparse.SUPPRESS}
                )


def add_options(
    parser: argparse.ArgumentParser, kind: Kind, *, without: Collection[str] = ()
) -> None:
    """Add a flag for each field of a command's options, with its default and without a variable.
    Read them by `options_from`.

    The flag of a boolean that is on by default is `--no-NAME`.
    """
    for field, plain, meta in fields_of(kind):
        if field.name in without:
            continue
        text = (meta.description or "").rstrip(".")
        if plain is not bool:
            text += _shown_default(field)
        text = text.replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": text}
        if plain is bool:
            flag = _flag(f"no_{field.name}" if field.default else field.name)
            parser.add_argument(
                flag, action="store_false" if field.default else "store_true", **options
            )
        elif get_origin(plain) is typing.Literal:
            parser.add_argument(_flag(field.name), choices=get_args(plain), **options)
        elif get_origin(plain) is tuple:
            options |= {"action": "append", "default": [], "metavar": "VALUE"}
            parser.add_argument(_flag(field.name), **options)
        else:
            usual = "X" if plain is float else _metavar(plain, meta)
            metavar = (meta.extra or {}).get("metavar") or usual
            required = field.default is msgspec.NODEFAULT
            parser.add_argument(
                _flag(field.name), type=plain, metavar=metavar, required=required, **options
            )


def options_from(kind: type[S], arguments: argparse.Namespace, **others: Any) -> S:
    """Make a struct from a command's flags. `others`: values of fields without flags."""
    flags = vars(arguments)
    fields = {name: flags[name] for name in kind.__struct_fields__ if name in flags}
    return kind(**fields | others)


def group_of(kind: Kind, meta: Meta) -> str:
    """Return the heading of a field's flag."""
    return str((meta.extra or {}).get("group") or kind.__name__.removesuffix("Config").lower())


def boolean_flags(*kinds: Kind) -> frozenset[str]:
    """Return the flags that may have no value."""
    return frozenset(
        _flag(field.name) for kind in kinds for field, plain, _ in fields_of(kind) if plain is bool
    )


def from_flags(kind: type[S], flags: Mapping[str, Any], environment: Mapping[str, str]) -> S:
    """Make a struct from flags, else variables, else defaults. Raises UsageError, naming the flag
    and its bounds, or what to use instead of a removed flag."""
    if kind is ModelConfig:
        for name, advice in RETIRED.items():
            text, source = _lookup(name, flags, environment)
            if text is not None:
                raise UsageError(f"{source} was removed: {advice}")
    values: dict[str, Any] = {}
    for field, plain, meta in fields_of(kind):
        text, source = _lookup(field.name, flags, environment)
        alias = _alias(meta)
        if alias is not None:
            old, old_source = _lookup(alias, flags, environment)
            if text is not None and old is not None:
                raise UsageError(
                    f"{source} and {old_source} exclude each other: {old_source} is the older name"
                )
            if old is not None:
                text, source = old, old_source
        if text is not None:
            values[field.name] = _value(text, plain, meta, source)
    return kind(**values)


def outdated(flags: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each name in use that is deprecated, and for each variable of a port
    that Kubernetes has set."""
    warnings = list[str]()
    for field, _, meta in (row for kind in SETTINGS for row in fields_of(kind)):
        variable = field.name.upper()
        if flags.get(field.name) is None and is_service_link(field.name, environment):
            warnings.append(
                f"{variable}={environment[variable]} is ignored: Kubernetes sets it for a Service "
                f"of that name; {_flag(field.name)} sets the port"
            )
        text, source = _lookup(_alias(meta) or "", flags, environment)
        if text is not None:
            warnings.append(f"{source} is deprecated: use {_flag(field.name)} or {variable}")
    return warnings


def is_set(name: str, arguments: argparse.Namespace) -> bool:
    """Return True if a setting's flag or variable is given."""
    return _lookup(name, vars(arguments), os.environ)[0] is not None


def _lookup(name: str, flags: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Any, str]:
    """Return (text, its flag or variable) of a setting. The text is None if it is not set."""
    text = flags.get(name)
    if text is not None:
        return text, _flag(name)
    if is_service_link(name, environment):
        return None, ""
    return environment.get(name.upper()), name.upper()


# The value of NAME_PORT that Kubernetes gives each pod for a Service NAME
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://.*:\d+")


def is_service_link(name: str, environment: Mapping[str, str]) -> bool:
    """Return True if the variable of a port has the address of a Service."""
    text = environment.get(name.upper(), "")
    return name.endswith("port") and SERVICE_LINK.fullmatch(text) is not None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _alias(meta: Meta) -> str | None:
    return (meta.extra or {}).get("alias")


def _value(text: str | list[str], plain: Any, meta: Meta, source: str) -> Any:
    if get_origin(plain) is tuple:
        return tuple([text] if isinstance(text, str) else text)
    assert isinstance(text, str)
    try:
        value: Any = text
        if plain is bool:
            value = BOOLEANS[text]
        elif plain in (int, float):
            value = plain(text)
        return msgspec.convert(value, typing.Annotated[plain, meta], strict=False)
    except (LookupError, ValueError, msgspec.ValidationError):
        raise UsageError(
            f"{source}: invalid value {text!r}: should be {values_of(plain, meta)}"
        ) from None


def values_of(plain: Any, meta: Meta) -> str:
    """The values that a setting may have."""
    if get_origin(plain) is typing.Literal:
        return " or ".join(f"`{value}`" for value in get_args(plain))
    if get_origin(plain) is tuple:
        return "text, repeatable"
    low = meta.ge if meta.ge is not None else meta.gt
    bounds = ""
    if low is not None and meta.le is None:
        bounds = f" from {low:,}"
    elif low is not None:
        bounds = f" {'above ' * (meta.gt is not None)}{low:,} to {meta.le:,}"
    return {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "text"}[
        plain
    ] + bounds


def _metavar(plain: Any, meta: Meta) -> str:
    if plain is float and meta.le == 1:
        return "SHARE"
    if get_origin(plain) is typing.Literal:
        return "{" + ",".join(get_args(plain)) + "}"
    return {int: "N", float: "SECONDS"}.get(plain, "TEXT")


def _shown_default(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if default in (None, (), msgspec.NODEFAULT):
        return ""
    return f" [default: {str(default).lower() if isinstance(default, bool) else default}]"


def new_parser(
    commands: Commands, name: str, run: Callable[..., Any], usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a command's parser, without abbreviated flags. The docstring of `run` is its help.
    `usage`: without the command."""
    about = " ".join((run.__doc__ or "").split())
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, allow_abbrev=False
    )
    if usage is not None:
        parser.usage = f"%(prog)s {usage}"
    parser.set_defaults(run=run, parser=parser)
    return parser


def read_settings(arguments: argparse.Namespace, kind: type[S]) -> S:
    """Read settings of one kind from flags and environment. Raises UsageError."""
    return from_flags(kind, vars(arguments), os.environ)


def read_engine(arguments: argparse.Namespace) -> EngineConfig:
    """Read the engine's settings. Raises UsageError, also for settings that exclude each other."""
    engine = read_settings(arguments, EngineConfig)
    if engine.default_prompt is not None and engine.default_prompt_name is not None:
        raise UsageError("`default-prompt` and `default-prompt-name` exclude each other")
    return engine
