"""Head files -> tensors on the device, shapes checked against what the checkpoint declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridtei.checkpoint.heads import MultivectorHead, SparseHead, read_linear, read_tensors
from hybridtei.checkpoint.modules import DenseModule
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from hybridtei.heads.dense import DenseLayer
from hybridtei.heads.sparse import LexicalWeights

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.nn.Identity(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def activation(name: str, where: Path | str) -> Callable[[Tensor], Tensor]:
    """By its name, plain ("gelu") or as a class of torch.nn ("torch.nn.modules.activation.Tanh"). Nothing is imported."""
    plain = name.rsplit(".", 1)[-1].lower()
    if plain not in ACTIVATIONS or ("." in name and not name.startswith("torch.nn.")):
        raise UnsupportedArchitecture(f"{where}: activation {name!r}; served: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[plain]


def dense_layer(module: DenseModule, device: torch.device) -> DenseLayer:
    """A sentence-transformers Dense layer, in float32. Raises LoadError."""
    files = [module.folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise MissingArtifact(f"{files[0]}: missing")
    tensors = read_tensors(file)
    weight = _tensor(tensors, "linear.weight", (module.out_features, module.in_features), file)
    bias = _tensor(tensors, "linear.bias", (module.out_features,), file) if module.bias else None
    return DenseLayer(
        weight.to(device, torch.float32),
        None if bias is None else bias.to(device, torch.float32),
        activation(module.activation, module.folder / "config.json"),
    )


def lexical_weights(head: SparseHead, hidden_size: int, dtype: torch.dtype, device: torch.device) -> LexicalWeights:
    """BGE-M3's `sparse_linear` or our perceptron, in the trunk's dtype. Raises LoadError."""
    assert head.file is not None
    inputs = hidden_size * len(head.inputs)
    if head.kind == "mlp":
        tensors = read_tensors(head.file)
        hidden_bias = _tensor(tensors, "sparse.hidden.bias", (None,), head.file)
        width = hidden_bias.shape[0]
        hidden_weight = _tensor(tensors, "sparse.hidden.weight", (width, inputs), head.file)
        out_weight = _tensor(tensors, "sparse.out.weight", (1, width), head.file)
        out_bias = _tensor(tensors, "sparse.out.bias", (1,), head.file)
        ready = [tensor.to(device, dtype) for tensor in (out_weight, out_bias, hidden_weight, hidden_bias)]
        return LexicalWeights(ready[0], ready[1], ready[2], ready[3], activation(head.activation, head.file))
    tensors, prefix = _linear(head.file, "sparse.out" if head.own else None)
    weight = _tensor(tensors, f"{prefix}weight", (1, inputs), head.file)
    bias = _tensor(tensors, f"{prefix}bias", (1,), head.file)
    return LexicalWeights(weight.to(device, dtype), bias.to(device, dtype))


def multivector_weights(
    head: MultivectorHead, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """(weight [d, h], bias [d] or None) in the trunk's dtype. Raises LoadError."""
    tensors, prefix = _linear(head.file, "multivector" if head.own else None)
    weight = _tensor(tensors, f"{prefix}weight", (head.dim, hidden_size), head.file).to(device, dtype)
    if f"{prefix}bias" not in tensors:
        return weight, None
    return weight, _tensor(tensors, f"{prefix}bias", (head.dim,), head.file).to(device, dtype)


def _linear(file: Path, name: str | None) -> tuple[dict[str, Tensor], str]:
    """(tensors, prefix of their names): in our own file a layer has a `name`, in BGE-M3's it is alone."""
    return (read_linear(file), "") if name is None else (read_tensors(file), f"{name}.")


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...], file: Path) -> Tensor:
    if name not in tensors:
        raise LoadError(f"{file}: lacks the tensor `{name}`, holds {sorted(tensors)}")
    found = tuple(tensors[name].shape)
    if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        raise WeightMismatch(f"{file}: `{name}` has shape {list(found)}, the model needs {list(shape)}")
    return tensors[name]
