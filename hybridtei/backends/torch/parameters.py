"""The layers of heads as tensors on a device. `checkpoint.layers` reads and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtei.backends.torch.pooled import DenseLayer, Layer, Norm
from hybridtei.backends.torch.sparse import LexicalWeights
from hybridtei.checkpoint import layers
from hybridtei.checkpoint.heads import MultivectorHead, SparseHead
from hybridtei.checkpoint.modules import DenseModule

# One for each name in `layers.ACTIVATIONS`.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.nn.Identity(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def dense_layer(module: DenseModule, device: torch.device) -> DenseLayer:
    """A sentence-transformers Dense layer, in float32. Raises LoadError."""
    layer = layers.dense_layer(module)
    weight, bias = _tensors(layer, torch.float32, device)
    return DenseLayer(weight, bias, ACTIVATIONS[layer.activation])


def lexical_weights(head: SparseHead, hidden_size: int, dtype: torch.dtype, device: torch.device) -> LexicalWeights:
    """BGE-M3's `sparse_linear` or our perceptron, in the trunk's dtype. Raises LoadError."""
    *hidden, out = layers.lexical_layers(head, hidden_size)
    out_weight, out_bias = _tensors(out, dtype, device)
    assert out_bias is not None
    if not hidden:
        return LexicalWeights(out_weight, out_bias)
    weight, bias = _tensors(hidden[0], dtype, device)
    return LexicalWeights(out_weight, out_bias, weight, bias, ACTIVATIONS[hidden[0].activation])


def multivector_weights(
    head: MultivectorHead, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """(weight [d, h], bias [d] or None) in the trunk's dtype. Raises LoadError."""
    return _tensors(layers.multivector_layer(head, hidden_size), dtype, device)


def classifier_parameters(arrays: Sequence[layers.ClassifierLayer], device: torch.device) -> list[Layer]:
    """A classifier's head, in float32."""

    def layer_of(arrays: layers.ClassifierLayer) -> Layer:
        weight, bias = _tensors(arrays, torch.float32, device)
        if isinstance(arrays, layers.NormLayer):
            return Norm(weight, bias, arrays.eps)
        return DenseLayer(weight, bias, ACTIVATIONS[arrays.activation])

    return [layer_of(layer) for layer in arrays]


def _tensors(layer: layers.ClassifierLayer, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    def tensor(array: NDArray[np.float32]) -> Tensor:
        return torch.tensor(array).to(device, dtype)

    return tensor(layer.weight), None if layer.bias is None else tensor(layer.bias)
