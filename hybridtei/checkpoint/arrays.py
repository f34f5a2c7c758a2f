"""Small weight files as float32 arrays: safetensors, or pickles that hold nothing but tensors, which alone need torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Positions
from hybridtei.checkpoint.files import positive, read_object, require
from hybridtei.errors import LoadError

Arrays = Mapping[str, NDArray[np.float32]]


def read_linear(file: Path) -> Arrays:
    """`weight` and `bias` of a one-layer head. Raises LoadError unless the file holds just these two tensors."""
    arrays = read_arrays(file)
    if set(arrays) != {"weight", "bias"}:
        raise LoadError(f"{file}: holds {sorted(arrays)}, should hold ['bias', 'weight']")
    return arrays


def read_arrays(file: Path) -> Arrays:
    """All tensors of a safetensors file, or of a pickle that holds nothing but tensors. Raises LoadError."""
    require(file)
    try:
        arrays = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except LoadError:
        raise
    except Exception as error:  # each library raises its own kinds, some of them bare
        raise LoadError(f"{file}: cannot be read as weights: {error}") from error
    for name, array in arrays.items():
        check_finite(array, file, name)
    return arrays


def _safetensors(file: Path) -> Arrays:
    import ml_dtypes  # noqa: F401  (teaches numpy bfloat16)
    from safetensors.numpy import load_file

    return {name: np.asarray(array, dtype=np.float32) for name, array in load_file(file).items()}


def _pickled(file: Path) -> Arrays:
    try:
        import torch
    except ImportError as error:
        raise LoadError(f"{file}: reading it needs PyTorch: pip install 'hybridtei[torch]'") from error
    tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise LoadError(f"{file}: should hold a dictionary of tensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


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


def check_finite(values: NDArray[Any], file: Path, name: str) -> None:
    """Raises LoadError, naming the file and the tensor, if it holds NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values, dtype=np.float32)):
            return
    wrong = values.size - int(np.count_nonzero(np.isfinite(values)))
    if wrong:
        raise not_finite(file, name, wrong, values.size)


def not_finite(file: Path, name: str, wrong: int, size: int) -> LoadError:
    """What is said of such a tensor."""
    return LoadError(f"{file}: `{name}` holds NaN or infinity, at {wrong} of {size} places")
