"""Writes flags.md: every flag of every command, read off the settings structs and the commands' own
parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import msgspec

from hybridtei import cli
from hybridtei.cli.flags import SETTINGS, group_of, values_of
from hybridtei.config import fields_of

PAGE = Path(__file__).parents[1] / "flags.md"
HEAD = """# Every flag

Use this page to look up a flag; `python -m notebooks.writing` writes it from the code. A flag
overrides its variable, and the variable overrides the default. A boolean flag needs no value.
In a flag's name `_` is `-`. `--hf-api-token` is the older name of `--hf-token`.
A setting without a default is off.
"""
DEFAULT = re.compile(r"\s*\[default: (.*)\]$")


def page() -> str:
    """The whole file."""
    parsers = cli.command_parsers()
    parts = [HEAD, "## Settings\n"]
    for kind in SETTINGS:
        takers = [name for name, parser in parsers.items() if _takes(parser, kind)]
        parts.append(
            f"### {kind.__name__}\n\nOf {_listed([f'`hybridtei {name}`' for name in takers])}.\n"
        )
        parts.append(
            _table(("flag", "variable", "values", "default", "meaning"), _settings_rows(kind))
        )
    parts.append("## Flags of single commands\n")
    for name, parser in chain.from_iterable(starmap(_with_actions, parsers.items())):
        taken = [kind for kind in SETTINGS if _takes(parser, kind)]
        common = {field.name for kind in taken for field, _, _ in fields_of(kind)} | {
            "hf_api_token"
        }
        own = [
            action
            for action in parser._actions
            if action.dest not in {*common, "help"} and action.help != argparse.SUPPRESS
        ]
        if own:
            parts.append(f"### hybridtei {name}\n\n{_sentence(parser.description or '')}\n")
            parts.append(_table(("flag", "default", "meaning"), map(_own_row, own)))
    return (
        "\n".join(parts)
        + "\nNext: [choose values](tuning.md), or see [what a client gets beyond a "
        + "limit](limits.md).\n"
    )


def _with_actions(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and its actions, if it has some."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((f"{name} {word}", command) for word, command in action.choices.items())


def _takes(parser: argparse.ArgumentParser, kind: Any) -> bool:
    names = {action.dest for action in parser._actions}
    return {field.name for field, _, _ in fields_of(kind)} <= names


def _settings_rows(kind: Any) -> Iterator[tuple[str, ...]]:
    headings: dict[str, list[tuple[str, ...]]] = {}
    for field, plain, meta in fields_of(kind):
        text = meta.description or ""
        match = DEFAULT.search(text.rstrip("."))
        default = ""
        if field.default not in (None, (), msgspec.NODEFAULT):
            default = _code(field.default)
        elif match:
            default = match[1]
        meaning = DEFAULT.sub("", text.rstrip(".")).rstrip(".") + "."
        flag = f"`--{field.name.replace('_', '-')}`"
        row = (flag, f"`{field.name.upper()}`", values_of(plain, meta), default, meaning)
        headings.setdefault(group_of(kind, meta), []).append(row)
    for rows in headings.values():
        yield from rows


def _own_row(action: argparse.Action) -> tuple[str, str, str]:
    text = (action.help or "").replace("%%", "%")
    match = DEFAULT.search(text)
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.choices:
        text = f"{', '.join(map(str, action.choices))}: {text}".removesuffix(": ")
    required = "required" if action.required else ""
    return f"`{name}`", match[1] if match else required, DEFAULT.sub("", text).strip()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _code(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
