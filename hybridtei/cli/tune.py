"""`tune`: measure backends and batch sizes on this machine."""

from __future__ import annotations

import argparse

from hybridtei.cli import settings
from hybridtei.cli.flags import add_flags
from hybridtei.config import EngineConfig, ModelConfig


def add(commands: settings.Commands) -> None:
    """Add the command `tune` and its flags."""
    parser = settings.new_parser(commands, "tune", "measure which backend and batch size suit this machine")
    parser.usage = "%(prog)s [flags]"
    add_flags(parser, (ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, and print each line as it comes."""
    model, engine = settings.read(arguments, ModelConfig), settings.read_engine(arguments)
    from hybridtei.backends.tune import tune as measured
    from hybridtei.load import find_model

    for line in measured(model, find_model(model), engine):
        print(line, flush=True)
