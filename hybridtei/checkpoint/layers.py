"""The linear layers of heads and Dense modules as arrays, checked against what the checkpoint declares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.checkpoint.arrays import Arrays, read_arrays, read_linear
from hybridtei.checkpoint.classifiers import LinearStep
from hybridtei.checkpoint.heads import MultivectorHead, SparseHead
from hybridtei.checkpoint.modules import DenseModule
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch

ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "gelu_pytorch_tanh", "silu", "sigmoid")


@dataclass(frozen=True, slots=True, eq=False)
class LinearLayer:
    """`activation(weight x + bias)`; weight float32[out, in], bias float32[out] or None."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None
    activation: str = "identity"


@dataclass(frozen=True, slots=True, eq=False)
class NormLayer:
    """LayerNorm: weight float32[h], bias float32[h] or None."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    eps: float


ClassifierLayer = LinearLayer | NormLayer


def dense_layer(module: DenseModule) -> LinearLayer:
    """A sentence-transformers Dense layer. Raises LoadError."""
    files = [module.folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise MissingArtifact(f"{files[0]}: missing")
    arrays = read_arrays(file)
    weight = _array(arrays, "linear.weight", (module.out_features, module.in_features), file)
    bias = _array(arrays, "linear.bias", (module.out_features,), file) if module.bias else None
    return LinearLayer(weight, bias, activation_name(module.activation, module.folder / "config.json"))


def lexical_layers(head: SparseHead, hidden_size: int) -> tuple[LinearLayer, ...]:
    """BGE-M3's one layer, or the two of our perceptron; the relu at the end is the head's. Raises LoadError."""
    assert head.file is not None
    arrays, prefix = _named(head.file, "sparse.out" if head.own else None)
    inputs = hidden_size * len(head.inputs)
    if head.kind == "linear":
        return (_linear(arrays, prefix, (1, inputs), head.file),)
    width = _array(arrays, "sparse.hidden.bias", (None,), head.file).shape[0]
    hidden = _linear(arrays, "sparse.hidden.", (width, inputs), head.file)
    activation = activation_name(head.activation, head.file)
    return LinearLayer(hidden.weight, hidden.bias, activation), _linear(arrays, prefix, (1, width), head.file)


def multivector_layer(head: MultivectorHead, hidden_size: int) -> LinearLayer:
    """The projection of each token. Raises LoadError."""
    if head.module is not None:
        layer = dense_layer(head.module)
        if layer.activation != "identity":
            raise UnsupportedArchitecture(f"{head.file}: a last layer with {layer.activation!r} is not served on tokens")
        return layer
    if head.tensor is not None:
        weights = Weights.open(head.file)
        if head.tensor not in weights.names():
            raise LoadError(f"{head.file}: the weights lack `{head.tensor}`")
        if weights.shape(head.tensor) != (head.dim, hidden_size):
            shape = list(weights.shape(head.tensor))
            raise WeightMismatch(f"{head.file}: `{head.tensor}` has shape {shape}, the model needs {[head.dim, hidden_size]}")
        return LinearLayer(weights.float32(head.tensor))
    arrays, prefix = _named(head.file, "multivector" if head.own else None)
    weight = _array(arrays, f"{prefix}weight", (head.dim, hidden_size), head.file)
    bias = _array(arrays, f"{prefix}bias", (head.dim,), head.file) if f"{prefix}bias" in arrays else None
    return LinearLayer(weight, bias)


def activation_name(name: str, where: Path | str) -> str:
    """Plain ("gelu") from plain, or from a class of torch.nn ("torch.nn.modules.activation.GELU"). Nothing is imported."""
    plain = name.rsplit(".", 1)[-1].lower()
    if plain not in ACTIVATIONS or ("." in name and not name.startswith("torch.nn.")):
        raise UnsupportedArchitecture(f"{where}: activation {name!r}; served: {', '.join(ACTIVATIONS)}")
    return plain


def _named(file: Path, name: str | None) -> tuple[Arrays, str]:
    """(arrays, prefix of their names): in our own file a layer has a `name`, in BGE-M3's it is alone."""
    return (read_linear(file), "") if name is None else (read_arrays(file), f"{name}.")


def _linear(arrays: Arrays, prefix: str, shape: tuple[int, int], file: Path) -> LinearLayer:
    return LinearLayer(_array(arrays, f"{prefix}weight", shape, file), _array(arrays, f"{prefix}bias", shape[:1], file))


def _array(arrays: Arrays, name: str, shape: tuple[int | None, ...], file: Path) -> NDArray[np.float32]:
    if name not in arrays:
        raise LoadError(f"{file}: lacks the tensor `{name}`, holds {sorted(arrays)}")
    found = arrays[name].shape
    if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        raise WeightMismatch(f"{file}: `{name}` has shape {list(found)}, the model needs {list(shape)}")
    return arrays[name]


EXACT, TANH = "gelu", "gelu_pytorch_tanh"
SETTINGS = ("hidden_act", "hidden_activation", "activation", "activation_function", "classifier_activation")


def with_tanh_gelu(spec: ModelSpec) -> ModelSpec:
    """The same model with the tanh form wherever it had the exact one: in its trunk, and in the head on top."""
    head = spec.classifier
    if head is not None:
        steps = tuple(
            replace(step, activation=TANH) if isinstance(step, LinearStep) and step.activation == EXACT else step
            for step in head.steps
        )
        head = replace(head, steps=steps)
    return replace(spec, tanh_gelu=True, classifier=head)


def in_config(config: Any) -> None:
    """The same said to transformers, in its configuration object."""
    for name in SETTINGS:
        if getattr(config, name, None) == EXACT:
            setattr(config, name, TANH)
