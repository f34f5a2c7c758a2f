"""Several models for one process: from repeated `--model-id`, or from a TOML file of `[[model]]` tables.

    [[model]]
    model_id = "minilm-hybrid"

    [[model]]
    model_id = "/models/reranker"
    alias = "rerank"
    dtype = "int8"

The keys of a table are the fields of `NamedModel`; what a table leaves out is taken from the flags.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hybridtei.config import ModelConfig, NamedModel
from hybridtei.errors import LoadError

ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def read_models(path: Path, flags: ModelConfig) -> list[NamedModel]:
    """The models of a file. Raises LoadError, naming the file, the table and the key."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read as a list of models: {error}") from error
    tables = content.get("model")
    if not isinstance(tables, list) or not tables or set(content) != {"model"}:
        raise LoadError(f"{path}: should hold nothing but [[model]] tables, at least one")
    return distinct([named_model(table, flags, f"{path}: model {number}") for number, table in enumerate(tables, 1)])


def named_model(table: Mapping[str, Any], flags: ModelConfig, where: str) -> NamedModel:
    """One table over the flags. Raises LoadError, beginning with `where`."""
    unknown = sorted(set(table) - set(NamedModel.__struct_fields__))
    if unknown:
        raise LoadError(f"{where}: unknown key `{unknown[0]}`; known: {', '.join(NamedModel.__struct_fields__)}")
    model_id = table.get("model_id")
    if not isinstance(model_id, str):
        raise LoadError(f"{where}: `model_id` should be a text")
    try:
        model = msgspec.convert({**msgspec.structs.asdict(flags), "alias": default_alias(model_id), **table}, NamedModel)
    except msgspec.ValidationError as error:
        raise LoadError(f"{where}: {error}") from None
    if not ALIAS.fullmatch(model.alias):
        raise LoadError(f"{where}: alias {model.alias!r} should be 1 to 100 letters, digits, dots, dashes, underscores")
    return model


def from_ids(model_ids: Sequence[str], flags: ModelConfig) -> list[NamedModel]:
    """The models of repeated flags. Raises LoadError."""
    return distinct([named_model({"model_id": model_id}, flags, model_id) for model_id in model_ids])


def distinct(models: Sequence[NamedModel]) -> list[NamedModel]:
    """The same. Raises LoadError if two share a name."""
    seen: set[str] = set()
    for model in models:
        if model.alias in seen:
            raise LoadError(f"two models are called {model.alias!r}: give one of them another `alias`")
        seen.add(model.alias)
    return [*models]


def default_alias(model_id: str) -> str:
    """Last part of a path or hub id."""
    return model_id.rstrip("/").rpartition("/")[2]
