"""The two programs: `hybridtei COMMAND`, and `text-embeddings-router`, which is `hybridtei serve` under TEI's name.

Usage errors exit with status 2; other errors print `Error: …` to standard error and exit with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hybridtei import __version__
from hybridtei.cli import collection, embed, model, serve
from hybridtei.cli.flags import SETTINGS, boolean_flags
from hybridtei.errors import HybridTeiError, UsageError

# What adds a command and its flags, in the order of the help.
COMMANDS = (
    *(serve.add, embed.add, collection.add_ingest, collection.add_search, collection.add_eval),
    *(model.add_train, model.add_export, model.add_tune),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hybridtei COMMAND`; return the exit status."""
    parser = argparse.ArgumentParser(prog="hybridtei", description="Dense, sparse and multi-vectors from one forward pass.")
    _add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return _run(parser, argv)


def router(argv: Sequence[str] | None = None) -> int:
    """Run `text-embeddings-router`; return the exit status."""
    parser = argparse.ArgumentParser(prog="text-embeddings-router", description=serve.ABOUT, allow_abbrev=False)
    _add_version(parser)
    serve.fill(parser)
    return _run(parser, argv)


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", "-V", action="version", version=f"{parser.prog} {__version__}")


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    arguments, unknown = parser.parse_known_args(explicit_booleans(sys.argv[1:] if argv is None else argv))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(without_values(unknown))}")
    try:
        return int(arguments.run(arguments) or 0)
    except UsageError as error:
        parser.error(str(error))
    except (HybridTeiError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def explicit_booleans(argv: Sequence[str]) -> list[str]:
    """Replace `--flag` by `--flag=true` unless true or false follows: argparse would take the next word as its value."""
    flags = boolean_flags(*SETTINGS)
    following = [*argv[1:], ""]
    return [
        f"{word}=true" if word in flags and after not in ("true", "false") else word
        for word, after in zip(argv, following, strict=False)
    ]


def without_values(unknown: Sequence[str]) -> list[str]:
    """Return unknown flags without their values: a misspelt flag may hold a key."""
    names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    return names or [*unknown]
