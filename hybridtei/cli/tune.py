"""`tune`: measure this machine."""

from __future__ import annotations

import argparse

from hybridtei.cli import settings
from hybridtei.cli.flags import add_flags
from hybridtei.config import EngineConfig, ModelConfig


def add(commands: settings.Commands) -> None:
    """`hybridtei tune`."""
    parser = settings.new_parser(commands, "tune", "measure which backend and batch size suit this machine")
    parser.usage = "%(prog)s [flags]"
    add_flags(parser, (ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, line by line."""
    model, engine = settings.read(arguments, ModelConfig), settings.read_engine(arguments)
    from hybridtei.backends.tune import tune as measured

    for line in measured(model, engine):
        print(line, flush=True)
