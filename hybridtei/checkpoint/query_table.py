"""The weights that an inference-free model looks its queries up in: one for each id of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridtei.checkpoint.arrays import read_arrays
from hybridtei.checkpoint.files import inside, read_object
from hybridtei.checkpoint.sizes import read_vocabulary
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import LoadError, WeightMismatch
from hybridtei.outputs import Floats


def query_table(spec: ModelSpec) -> Floats | None:
    """float32[v], or None of a model that computes its queries. Raises LoadError and its kinds, naming the file."""
    place = None if spec.sparse is None else spec.sparse.queries
    if place is None:
        return None
    if place.suffix == ".json":
        return _idf(place, spec)
    described = read_object(place / "config.json", optional=True).get("path")
    if isinstance(described, str):
        return _idf(inside(place.parent, described), spec)
    files = [place / name for name in ("model.safetensors", "pytorch_model.bin")]
    file = next((file for file in files if file.exists()), files[0])
    arrays = read_arrays(file)
    if set(arrays) != {"weight"} or arrays["weight"].ndim != 1:
        raise LoadError(f"{file}: should hold one row called `weight`, and holds {sorted(arrays)}")
    weights = arrays["weight"]
    if len(weights) > spec.vocab_size:
        raise WeightMismatch(f"{file}: weighs {len(weights)} ids, the model has {spec.vocab_size}")
    return np.concatenate([weights, np.zeros(spec.vocab_size - len(weights), dtype=np.float32)])


def _idf(file: Path, spec: ModelSpec) -> Floats:
    """Words that the vocabulary lacks are left out; what has no weight weighs nothing."""
    weights, words = np.zeros(spec.vocab_size, dtype=np.float32), read_vocabulary(spec.folder / "tokenizer.json")
    for word, weight in read_object(file).items():
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise LoadError(f"{file}: `{word}` is {weight!r}, should be a number")
        if words.get(word, spec.vocab_size) < spec.vocab_size:
            weights[words[word]] = weight
    return weights
