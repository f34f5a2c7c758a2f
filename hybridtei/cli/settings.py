"""Flags and environment -> structs. Every command reads its settings here."""

from __future__ import annotations

import argparse
import os
from typing import Any, TypeVar

import msgspec

from hybridtei.cli import flags
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig, StoreConfig
from hybridtei.errors import UsageError

ALL = (ModelConfig, EngineConfig, ServerConfig, StoreConfig)

S = TypeVar("S", bound=msgspec.Struct)
Commands = Any  # argparse does not name what `add_subparsers` gives


def new_parser(commands: Commands, name: str, about: str) -> argparse.ArgumentParser:
    """A command's parser: no abbreviated flags, and a first line of help that does not repeat them all."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    return parser


def read(arguments: argparse.Namespace, kind: type[S]) -> S:
    """Settings of one kind. Raises UsageError."""
    return flags.from_flags(kind, vars(arguments), os.environ)


def read_engine(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's settings. Raises UsageError, also for two that exclude each other."""
    engine = read(arguments, EngineConfig)
    if engine.default_prompt is not None and engine.default_prompt_name is not None:
        raise UsageError("`default-prompt` and `default-prompt-name` exclude each other")
    return engine


def outdated(arguments: argparse.Namespace) -> list[str]:
    """Return a warning for each older name that was used."""
    return [warning for kind in ALL for warning in flags.outdated(kind, vars(arguments), os.environ)]
