"""`tune`: measure this machine."""

from __future__ import annotations

import argparse

from hybridtei.commands import settings
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.flags import add_flags


def add(commands: settings.Commands) -> None:
    """`hybridtei tune`."""
    parser = settings.new_parser(commands, "tune", "measure which backend and batch size suit this machine")
    parser.usage = "%(prog)s [flags]"
    add_flags(parser, (ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, line by line."""
    model, engine = settings.read(arguments, ModelConfig), settings.read_engine(arguments)
    from hybridtei.tune import tune as measured

    for line in measured(model, engine):
        print(line, flush=True)
