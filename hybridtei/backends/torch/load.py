"""A checkpoint as what `TorchBackend` runs: the trunk and the layers of its heads, on one device."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from hybridtei.backends.graph.mlm_head import MlmLayers
from hybridtei.backends.graph.weights import check_names, checked_key, word_table
from hybridtei.backends.torch.heads import HeadWeights, LogitsOf
from hybridtei.backends.torch.ops import ModuleOptions, family_module, path_of
from hybridtei.backends.torch.padded import PaddedTrunk
from hybridtei.backends.torch.parameters import (
    ACTIVATIONS,
    classifier_parameters,
    dense_layer,
    lexical_weights,
    multivector_weights,
)
from hybridtei.backends.torch.pretrained import load_model
from hybridtei.backends.torch.trunk import PackedTrunk, Trunk
from hybridtei.checkpoint.hub_layouts import is_translated
from hybridtei.checkpoint.layers import classifier_layers
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights, has_weights, not_finite
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.families import run_family

log = logging.getLogger(__name__)


def load(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> tuple[Trunk, HeadWeights]:
    """(trunk, heads) with a checkpoint's weights; pooling and classifiers in float32. Raises LoadError."""
    trunk, logits_of = _load_trunk(spec, dtype, device, trust_remote_code)
    late, classifier = spec.multivector, spec.classifier
    sparse = None if spec.is_splade else spec.sparse
    heads = HeadWeights(
        dense=[dense_layer(module, device) for module in spec.dense_modules],
        lexical=None if sparse is None else lexical_weights(sparse, spec.hidden_size, dtype, device),
        projection=None if late is None else multivector_weights(late, spec.hidden_size, dtype, device),
        before=() if late is None else [dense_layer(module, device) for module in late.before],
        classifier=()
        if classifier is None
        else classifier_parameters(classifier_layers(classifier, spec.folder, spec.hidden_size), device),
        logits_of=logits_of,
    )
    return trunk, heads


def _load_trunk(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[Trunk, LogitsOf | None]:
    """transformers' modules where no family here computes the model, or its weights are in a form that only torch reads."""
    try:
        if not has_weights(spec.folder):
            raise UnsupportedArchitecture(
                f"{spec.folder}: its weights are neither safetensors nor as torch 1.6 and later save them"
            )
        return load_family(spec, dtype, device)
    except UnsupportedArchitecture as refused:
        if spec.is_splade or spec.adapters is not None:
            raise
        if is_translated(spec.config, spec.folder / "config.json") and not trust_remote_code:
            raise  # transformers takes its own defaults for what the makers' words say, and computes another model
        log.info("transformers' own modules run this model, padded: %s", refused)
    model = load_model(spec, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
    return PaddedTrunk(model, spec, device), None


def load_family(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, joined: bool | None = None
) -> tuple[PackedTrunk, LogitsOf | None]:
    """(trunk by its family, masked-language-model head if the model is a SPLADE). Raises LoadError.

    `joined`: whether projections of the same rows become one product. They do on a GPU: a launch less is time there, and a
    larger product fills more of the card. On a CPU neither is so.
    """
    weights, keys, shapes = Weights.open(spec.folder), dict[str, str](), dict[str, tuple[int, ...]]()

    def tensor_of(name: str, shape: tuple[int, ...]) -> Tensor:
        keys[name], shapes[name] = checked_key(weights, name, shape), shape
        tensor = as_tensor(weights.stored(keys[name])).to(device, dtype)
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # half precision may have made infinity of a large number
            wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
            if wrong:
                raise not_finite(spec.folder, keys[name], wrong, tensor.numel())
        return tensor

    family = partial(
        run_family,
        model_type=spec.model_type,
        config=spec.config,
        file=str(spec.folder / "config.json"),
        adapters=None if spec.adapters is None else spec.adapters.form,
    )
    joined = device.type == "cuda" if joined is None else joined
    options = ModuleOptions(dtype, device, joined=joined, typed=spec.has_token_types, tanh_gelu=spec.tanh_gelu)
    module, forms = family_module(family, tensor_of, options)
    check_names(keys, weights)
    words = word_table(spec, shapes)
    trunk = PackedTrunk(module, forms, spec, device=device, dtype=dtype, words=None if words is None else path_of(words))
    if not spec.is_splade:
        return trunk, None
    assert words is not None
    return trunk, _logits(MlmLayers.read(spec, weights, weights.float32(keys[words])), dtype, device)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over the same memory, which torch must not write to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is read-only
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def _logits(layers: MlmLayers, dtype: torch.dtype, device: torch.device) -> LogitsOf:
    """hidden float[t, h] -> logits float[t, v]."""

    def placed(array: NDArray[np.float32] | None) -> Tensor | None:
        return None if array is None else as_tensor(array).to(device, dtype)

    weight, bias, scale, shift, table, last = map(
        placed, (layers.dense.weight, layers.dense.bias, layers.scale, layers.shift, layers.table, layers.bias)
    )
    assert weight is not None
    assert table is not None
    activation = ACTIVATIONS[layers.dense.activation]

    def logits_of(hidden: Tensor) -> Tensor:
        rows = activation(linear(hidden, weight, bias))
        return linear(layer_norm(rows, rows.shape[-1:], scale, shift, layers.epsilon), table, last)

    return logits_of
