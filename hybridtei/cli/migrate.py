"""The command `migrate`: a collection changes its model, or how it keeps multi-vectors, while it is searched and written."""

from __future__ import annotations

import argparse

from hybridtei.cli.flags import Commands, add_flags, add_options, new_parser, options_from, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.retrieval.migrate import MigrateOptions
from hybridtei.system.machine import require_extra

ABOUT = "Embed a collection's stored texts with another model, then switch its name to that copy; run it again after a stop."
STEPS = {
    "rollback": "let the collection that answered before answer again, with what was written since",
    "status": "print which collection answers, and which are its copies",
    "delete_old": "delete the collection that answered before",
}


def add(commands: Commands) -> None:
    """Add the command `migrate` and its flags."""
    parser = new_parser(commands, "migrate", ABOUT)
    parser.usage = "%(prog)s COLLECTION (--to MODEL | --multivector-tokens N | --rollback | --status | --delete-old) [flags]"
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument("--to", metavar="MODEL", help="folder or hub id of the new model [default: the collection's]")
    steps = parser.add_mutually_exclusive_group()
    for step, text in STEPS.items():
        steps.add_argument(
            f"--{step.replace('_', '-')}", dest="step", action="store_const", const=step, default="migrate", help=text
        )
    without = ("collection", "step", "to", "multivector_tokens", "multivector_dtype")
    add_options(parser, MigrateOptions, without=without)
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Take a step, and print the outcome."""
    require_extra("qdrant", "qdrant_client")
    from hybridtei.retrieval.migrate.run import run_migration

    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    budget = {"multivector_tokens": model.multivector_tokens, "multivector_dtype": model.multivector_dtype}
    names = {name: value for name, value in vars(arguments).items() if name not in budget and name != "run"}
    options = options_from(MigrateOptions, argparse.Namespace(**names), **budget)
    run_migration(options, model, engine, read_settings(arguments, StoreConfig), tell=lambda line: print(line, flush=True))
