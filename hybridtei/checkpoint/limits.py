"""How long an input may be, by the three files that say something of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtei.batch import Positions
from hybridtei.checkpoint.files import positive, read_object
from hybridtei.errors import LoadError

LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
UNSET_LENGTH = 1_000_000  # transformers writes about 1e30 for "no limit"


def max_input_length(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], positions: Positions, *, sides: bool
) -> int:
    """The smallest of what the tokenizer, sentence-transformers and the table of positions allow. `sides`: queries and
    documents have lengths of their own, and what sentence-transformers says is left from one of them."""
    sentence_file, sentence = sentence_config(folder)
    lengths = (
        _length(tokenizer_config, "model_max_length", folder / "tokenizer_config.json"),
        None if sides else _length(sentence, "max_seq_length", sentence_file),
        _table_length(config, positions, folder / "config.json"),
    )
    told = [length for length in lengths if length is not None]
    if not told:
        raise LoadError(f"{folder / 'config.json'}: lacks `max_position_embeddings`, and no other file tells the length")
    return min(told)


def _table_length(config: Mapping[str, Any], positions: Positions, file: Path) -> int | None:
    key = next((key for key in ("max_position_embeddings", "max_trained_positions") if config.get(key)), None)
    if key is None:
        return None
    length = positive(config, key, file) - positions.offset
    if length < 1:
        raise LoadError(f"{file}: `{key}` is {config[key]}, but positions begin at {positions.offset}")
    return length


def _length(settings: Mapping[str, Any], key: str, file: Path) -> int | None:
    if settings.get(key) is None:
        return None
    length = positive(settings, key, file)
    return None if length >= UNSET_LENGTH else length


def sentence_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The first of sentence-transformers' settings files that is there, and what it says."""
    file = next((folder / name for name in LENGTH_FILES if (folder / name).exists()), folder / LENGTH_FILES[0])
    return file, read_object(file, optional=True)
