"""The layers of a classifier's head as arrays, by their exact names; nothing made up, and nothing left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridtei.checkpoint.arrays import read_arrays
from hybridtei.checkpoint.classifiers import ClassifierHead, LinearStep, NormStep
from hybridtei.checkpoint.files import inside, read_object
from hybridtei.checkpoint.layers import ClassifierLayer, LinearLayer, NormLayer, activation_name
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import LoadError, WeightMismatch

# How the names of heads' tensors begin, in any family; what a pre-training left, such as `cls` or `lm_head`, is harmless.
OF_HEADS = frozenset(
    {
        *("classification_head", "classifier", "dense", "head", "linear", "out_proj", "pooler", "pre_classifier", "score"),
        *("regressor", "sequence_summary", "v_head"),
    }
)


class _Tensors(Protocol):
    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def float32(self, name: str) -> NDArray[np.float32]: ...
    def rows(self, name: str, rows: Sequence[int]) -> NDArray[np.float32]: ...


def classifier_layers(head: ClassifierHead, folder: Path, hidden_size: int) -> tuple[ClassifierLayer, ...]:
    """From a state of `hidden_size` to one number a label. Raises WeightMismatch or LoadError, naming the tensor."""
    tensors = _open(folder)
    layers, used, width = list[ClassifierLayer](), set[str](), hidden_size
    for step in head.steps:
        reader = _Reader(tensors, folder, used)
        layer = reader.norm(step, width) if isinstance(step, NormStep) else reader.linear(step, width, folder)
        layers.append(layer)
        width = layer.weight.shape[0]
    if width != len(head.labels):
        raise WeightMismatch(
            f"{folder}: `{head.steps[-1].name}` gives {width} logits, config.json names {len(head.labels)} labels"
        )
    left = sorted(name for name in tensors.names() - used if _is_of_another_head(name, head))
    if left:
        raise WeightMismatch(f"{folder}: the weights hold what config.json does not: {left[:5]}, {len(left)} in all")
    return tuple(layers)


def _is_of_another_head(name: str, head: ClassifierHead) -> bool:
    return not name.startswith(head.trunk) and name.split(".", maxsplit=1)[0] in OF_HEADS


class _Reader:
    def __init__(self, tensors: _Tensors, folder: Path, used: set[str]) -> None:
        self._tensors = tensors
        self._folder = folder
        self._used = used

    def linear(self, step: LinearStep, width: int, folder: Path) -> LinearLayer:
        weight = self._tensor(f"{step.name}.weight", (None, width), step.rows)
        bias = self._tensor(f"{step.name}.bias", (None if step.rows else len(weight),), step.rows) if step.bias else None
        return LinearLayer(weight, bias, activation_name(step.activation, folder / "config.json"))

    def norm(self, step: NormStep, width: int) -> NormLayer:
        weight = self._tensor(f"{step.name}.weight", (width,))
        return NormLayer(weight, self._tensor(f"{step.name}.bias", (width,)) if step.bias else None, step.eps)

    def _tensor(
        self, name: str, shape: tuple[int | None, ...], rows: tuple[int, int | None] | None = None
    ) -> NDArray[np.float32]:
        if name not in self._tensors.names():
            raise WeightMismatch(f"{self._folder}: the weights lack `{name}`; nothing was made up")
        self._used.add(name)
        found = self._tensors.shape(name)
        if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
            raise WeightMismatch(f"{self._folder}: `{name}` has shape {list(found)}, the model needs {list(shape)}")
        if rows is None:
            return self._tensors.float32(name)
        if max(row or 0 for row in rows) >= found[0]:
            raise WeightMismatch(f"{self._folder}: `{name}` has {found[0]} rows, the ids {list(rows)} are wanted")
        picked = self._tensors.rows(name, [row for row in rows if row is not None])
        return picked[:1] - picked[1:] if len(picked) > 1 else picked


def _open(folder: Path) -> _Tensors:
    pickles = (folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json")
    if any(folder.glob("model*.safetensors")) or not any(file.exists() for file in pickles):
        return Weights.open(folder)
    if pickles[0].exists():
        return _Pickled(read_arrays(pickles[0]))
    names = read_object(pickles[1]).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(f"{pickles[1]}: lacks `weight_map`")
    shards = sorted({str(name) for name in names.values()})
    return _Pickled({name: array for shard in shards for name, array in read_arrays(inside(folder, shard)).items()})


class _Pickled:
    """A checkpoint without safetensors."""

    def __init__(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        self._arrays = arrays

    def names(self) -> frozenset[str]:
        return frozenset(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def float32(self, name: str) -> NDArray[np.float32]:
        return self._arrays[name]

    def rows(self, name: str, rows: Sequence[int]) -> NDArray[np.float32]:
        return self._arrays[name][list(rows)]
