"""The words of a `tokenizer.json` and their ids, whatever kind of model it holds; without building the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hybridtei.checkpoint.files import read_object, require
from hybridtei.errors import LoadError, WeightMismatch


def read_vocabulary(file: Path) -> dict[str, int]:
    """Every token, added ones too. Raises LoadError, naming the file."""
    described = read_object(file)
    try:
        listed = described["model"]["vocab"]
        # Of Unigram, a list of pieces and their scores.
        words = dict(listed) if isinstance(listed, dict) else {entry[0]: place for place, entry in enumerate(listed)}
        added = {token["content"]: token["id"] for token in described.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise LoadError(f"{file}: its `model` should hold a `vocab`, and `added_tokens` a `content` and `id` each") from error
    return {**words, **added}


# Names of the same size in different families, and what no model comes near.
MOST: Mapping[str, tuple[tuple[str, ...], int]] = {
    "vocab": (("vocab_size",), 10_000_000),
    "hidden": (("hidden_size", "dim"), 131_072),
    "layers": (("num_hidden_layers", "n_layers"), 2_048),
    "inner": (("intermediate_size", "hidden_dim"), 2_097_152),
    "heads": (("num_attention_heads", "n_heads", "num_key_value_heads"), 4_096),
    "narrow": (("embedding_size",), 131_072),
    "types": (("type_vocab_size",), 65_536),
    "positions": (("max_position_embeddings", "max_trained_positions"), 100_000_000),
}
SHARED_LAYERS = frozenset({"albert"})  # one set of weights for all layers
WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")  # the first that is there


def check_sizes(config: Mapping[str, Any], home: Path, *, has_position_table: bool) -> None:
    """Raises LoadError for a size beyond any model's, and WeightMismatch for one that the files cannot hold; before that, if
    those files are not whole."""
    file = home / "config.json"
    for names, most in MOST.values():
        for name in names:
            value = config.get(name)
            if isinstance(value, int | float) and value > most:
                raise LoadError(f"{file}: `{name}` is {value}, more than {most}")
    held = sum(_whole(path).stat().st_size for path in _weight_files(home))
    described = least_weights(config, has_position_table=has_position_table)
    if held and described > held:
        raise WeightMismatch(f"{file}: describes at least {described} weights, but the files of weights hold {held} bytes")


def least_weights(config: Mapping[str, Any], *, has_position_table: bool = False) -> int:
    """How many weights a model of this configuration has at least: its tables, and one matrix a layer."""
    hidden = _size(config, "hidden")
    tables = _size(config, "vocab") * (_size(config, "narrow") or hidden)
    if has_position_table:
        tables += _size(config, "positions") * (_size(config, "narrow") or hidden)
    shared = config.get("model_type") in SHARED_LAYERS
    layers = min(_size(config, "layers"), 1) if shared else _size(config, "layers")
    return tables + layers * hidden * _size(config, "inner")


def _weight_files(home: Path) -> list[Path]:
    found = ([*home.glob(pattern)] for pattern in WEIGHTS)
    return next((files for files in found if files), [])


def _whole(path: Path) -> Path:
    require(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy"):
                pass  # which compares the header with itself and with the file's size
        except Exception as error:  # kinds of the library's own
            raise LoadError(f"{path}: cannot be read as weights: {error}") from error
    return path


def _size(config: Mapping[str, Any], what: str) -> int:
    """The first that is there; 0 for none, which is another's to complain of."""
    values = (config.get(name) for name in MOST[what][0])
    return next((int(value) for value in values if isinstance(value, int) and value > 0), 0)
