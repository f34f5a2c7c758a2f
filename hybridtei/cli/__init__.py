"""The two programs: `hybridtei COMMAND`, and `text-embeddings-router`, which is `hybridtei serve`
under TEI's name.

Usage errors exit with status 2; other errors print `Error: …` to standard error and exit with
status 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from hybridtei import __version__
from hybridtei.cli.flags import SETTINGS, Commands, boolean_flags
from hybridtei.errors import HybridTeiError, NoKey, UsageError, name_of
from hybridtei.system import machine, memory
from hybridtei.system.terminal import safe_streams, without_passwords

FLAG = re.compile("^--[^=]+")
# Flags of former versions and of other programs -> what to write
FOREIGN = {
    "--http": "`hybridtei serve` answers agents at http://HOST:PORT/collections/NAME/mcp",
    "--k": "--limit is the number of hits, --rrf-k the constant of rrf",
    **dict.fromkeys(("--device", "--device-id", "--gpu", "--cuda"), "--backend torch uses a GPU"),
    **dict.fromkeys(("--top-k", "--top-n"), "--limit is the number of hits"),
    "--quantize": "--dtype is the precision",
    "--batch-size": "--max-batch-tokens bounds a pass",
    "--workers": "a server uses all cores; several share a port by --reuse-port",
}
# --url-api-key, --api-key-a
KEY_OF_A_SERVER = re.compile("--(url-api-key|api-key-[ab])$")
# command -> the function that adds it and its flags, in the order of the help. Its module is
# imported when needed.
COMMANDS = {
    "serve": "serve.add",
    "embed": "embed.add",
    "ingest": "collection.add_ingest",
    "search": "collection.add_search",
    "ask": "ask.add",
    "eval": "collection.add_eval",
    "collections": "collections.add",
    "migrate": "collection.add_migrate",
    "mcp": "mcp.add",
    "train": "model.add_train",
    "export": "model.add_export",
    "tune": "model.add_tune",
    "pack": "model.add_pack",
    "compare": "model.add_compare",
    "explain": "model.add_explain",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hybridtei COMMAND`; return the exit status."""
    argv = _prepare_process(argv)
    parser = argparse.ArgumentParser(
        prog="hybridtei", description="Dense, sparse and multi-vectors from one forward pass."
    )
    _add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # Only the command's own module is imported, except for the help and for an unknown command
    names = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    if names == ["explain"] and argv[1:] not in (["-h"], ["--help"]):
        # Flags in a message are words
        argv = ["explain", "--", *argv[1:]]
    for name in names:
        add_command(commands, name)
    if argv and names is COMMANDS and not argv[0].startswith("-"):
        hint = f"known: {', '.join(COMMANDS)}"
        for near in get_close_matches(argv[0], COMMANDS, 1):
            hint = f"did you mean {near}?"
        parser.error(f"there is no command {argv[0]!r}; {hint}")
    return _run(parser, argv)


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    commands = argparse.ArgumentParser(prog="hybridtei").add_subparsers()
    for name in COMMANDS:
        add_command(commands, name)
    return dict(commands.choices)


def add_command(commands: Commands, name: str) -> None:
    """Add a command of `COMMANDS` and its flags to a parser's."""
    module, _, add = COMMANDS[name].partition(".")
    getattr(import_module(f"hybridtei.cli.{module}"), add)(commands)


def router(argv: Sequence[str] | None = None) -> int:
    """Run `text-embeddings-router`; return the exit status."""
    argv = _prepare_process(argv)
    from hybridtei.cli import serve

    parser = argparse.ArgumentParser(
        prog="text-embeddings-router", description=serve.run.__doc__, allow_abbrev=False
    )
    _add_version(parser)
    serve.add_serve_flags(parser, as_tei=True)
    return _run(parser, argv)


def _prepare_process(argv: Sequence[str] | None) -> Sequence[str]:
    """Prepare the process: leave process 1, replace closed output streams, collect garbage seldom.
    Return the command's words; `argv` None: the arguments of this process."""
    if argv is None:
        machine.leave_process_one()
    for name in ("stdout", "stderr"):
        # The stream was closed. Without a replacement the next file opened would get its number,
        # and print would fail
        if getattr(sys, name) is None:
            # Left open until the process ends
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    memory.collect_seldom()
    return sys.argv[1:] if argv is None else argv


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", "-V", action="version", version=f"{parser.prog} {__version__}")


def _run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    with safe_streams():
        return _status(parser, argv)


def _status(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    arguments, unknown = parser.parse_known_args(explicit_booleans(argv))
    # The command's, for its usage
    parser = vars(arguments).pop("parser", parser)
    if unknown:
        names = without_values(unknown)
        parser.error(f"unrecognized arguments: {' '.join(names)}{_hint(names[0], parser)}")
    try:
        return int(arguments.run(arguments) or 0)
    except UsageError as error:
        parser.error(f"{without_passwords(str(error))}\n{_help_on(error)}")
    except (HybridTeiError, OSError) as error:
        print(f"Error: {without_passwords(str(error))}", file=sys.stderr)
        if isinstance(error, HybridTeiError):
            print(_help_on(error), file=sys.stderr)
        keys = [flag for flag in parser._option_string_actions if KEY_OF_A_SERVER.match(flag)]
        if isinstance(error, NoKey) and keys:
            print(f"give the server's key by {' or '.join(keys)} KEY", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _hint(flag: str, parser: argparse.ArgumentParser) -> str:
    """What to write in place of a flag that a command does not have."""
    if flag in FOREIGN:
        return f"; {FOREIGN[flag]}"
    owners = [
        name for name, other in command_parsers().items() if flag in other._option_string_actions
    ]
    if owners:
        return f"; {flag} is a flag of {', '.join(owners)}"
    return "".join(
        f"; did you mean {near}?"
        for near in get_close_matches(flag, parser._option_string_actions, 1)
    )


def _help_on(error: HybridTeiError) -> str:
    return f"Cause and cure: hybridtei explain {name_of(error)}"


def explicit_booleans(argv: Sequence[str]) -> list[str]:
    """Replace `--flag` by `--flag=true` unless true or false follows: argparse would take the next
    word as its value. `--a_flag` is `--a-flag`, as for vLLM."""
    flags = boolean_flags(*SETTINGS)
    argv = [FLAG.sub(lambda name: name[0].replace("_", "-"), word) for word in argv]
    following = [*argv[1:], ""]
    return [
        f"{word}=true" if word in flags and after not in ("true", "false") else word
        for word, after in zip(argv, following, strict=False)
    ]


def without_values(unknown: Sequence[str]) -> list[str]:
    """Return unknown flags without their values: a misspelt flag may hold a key."""
    names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    return names or [*unknown]
