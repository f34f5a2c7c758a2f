"""A checkpoint as what `TorchBackend` runs: the trunk and the layers of its heads, on one device."""

from __future__ import annotations

import torch

from hybridtei.backends.torch_heads import HeadWeights
from hybridtei.checkpoint.layers import classifier_layers
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.heads.parameters import classifier_parameters, dense_layer, lexical_weights, multivector_weights
from hybridtei.trunk.pretrained import load_trunk
from hybridtei.trunk.trunk import Trunk


def load(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> tuple[Trunk, HeadWeights]:
    """(trunk, heads) with a checkpoint's weights; pooling and classifiers in float32. Raises LoadError."""
    trunk, logits_of = load_trunk(spec, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
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
