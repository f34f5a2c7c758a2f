"""Layers of heads, Dense modules and classifiers as arrays, checked against the checkpoint's
declarations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.classifiers import (
    ClassifierHead,
    CodeLayers,
    Layer,
    LinearLayer,
    NormLayer,
)
from hybridtei.models.checkpoint.files import inside, read_object
from hybridtei.models.checkpoint.heads import MultivectorHead, SparseHead
from hybridtei.models.checkpoint.kinds import Labels
from hybridtei.models.checkpoint.modules import DenseModule, StepModule
from hybridtei.models.checkpoint.spec import STATIC_TABLES, ModelSpec
from hybridtei.models.checkpoint.tokenizer.vocabularies import read_vocabulary
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.family import LinearStep, NormStep
from hybridtei.outputs import Floats

OTHER_NAMES = {
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "swish": "silu",
    # transformers' classes
    "geluactivation": "gelu",
    "newgeluactivation": "gelu_pytorch_tanh",
}
ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "gelu_pytorch_tanh", "silu", "sigmoid")


# Of torch's LayerNorm, and of a SparseAutoEncoder's divisor
TORCH_EPSILON = 1e-5


def dense_layer(module: DenseModule) -> LinearLayer:
    """Read a sentence-transformers Dense layer. Raises LoadError."""
    weights = Weights.open(module.folder)
    weight = weights.array("linear.weight", (module.out_features, module.in_features))
    bias = None
    if module.bias:
        bias = weights.array("linear.bias", (module.out_features,))
    return LinearLayer(
        weight, bias, activation_name(module.activation, module.folder / "config.json")
    )


def step_layer(module: StepModule) -> Layer:
    """Read a Dense or a LayerNorm module. Raises LoadError."""
    if isinstance(module, DenseModule):
        return dense_layer(module)
    weights, shape = Weights.open(module.folder), (module.out_features,)
    return NormLayer(
        weights.array("norm.weight", shape), weights.array("norm.bias", shape), TORCH_EPSILON
    )


def code_layers(head: SparseHead, pooled_width: int) -> CodeLayers:
    """Read a SparseAutoEncoder. Its centre moves into the bias: W (x - c) + b = W x + (b - W c).
    Raises LoadError."""
    assert head.file is not None
    weights = Weights.open(head.file)
    # Checkpoints have the same tensor under one of two names
    name = "encoder.weight" if weights.has("encoder.weight") else "decoder.linear.weight"
    latents = weights.array(name, (head.width, pooled_width))
    centre = weights.array("pre_bias", (pooled_width,)).astype(np.float64)
    bias = weights.array("latent_bias", (head.width,)) - latents.astype(np.float64) @ centre
    return CodeLayers(
        latents, bias.astype(np.float32), head.active, TORCH_EPSILON if head.normalized else None
    )


def static_table(spec: ModelSpec) -> Floats:
    """Read the token vectors float32[v, d] of a StaticEmbedding, in sentence-transformers' or
    Model2Vec's format. Model2Vec may share rows between tokens (`mapping`) and weight them
    (`weights`). Raises LoadError."""
    weights = Weights.open(spec.folder)
    name = next(filter(weights.has, STATIC_TABLES))
    table = weights.float32(name)
    if name == "embedding.weight":
        return table
    if weights.has("mapping"):
        rows = weights.stored("mapping").astype(np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(table)):
            raise WeightMismatch(
                f"{spec.folder}: `mapping` names rows beyond the {len(table)} of `{name}`"
            )
        table = table[rows]
    if weights.has("weights"):
        table = table * weights.float32("weights")[:, None]
    return table


def lexical_layers(head: SparseHead, hidden_size: int) -> tuple[LinearLayer, ...]:
    """Read BGE-M3's single layer, or the two layers of our perceptron. The head applies the last
    relu. Raises LoadError."""
    assert head.file is not None
    weights = Weights.of_file(head.file)
    prefix = "sparse.out." if head.own else ""
    inputs = hidden_size * len(head.inputs)
    if head.kind == "linear":
        return (_linear(weights, prefix, (1, inputs)),)
    width = weights.shape(weights.checked("sparse.hidden.bias", (None,)))[0]
    hidden = _linear(weights, "sparse.hidden.", (width, inputs))
    activation = activation_name(head.activation, head.file)
    return replace(hidden, activation=activation), _linear(weights, prefix, (1, width))


def multivector_layer(head: MultivectorHead, hidden_size: int) -> LinearLayer:
    """Read the projection of tokens. Raises LoadError."""
    if head.module is not None:
        layer = dense_layer(head.module)
        if layer.activation != "identity":
            raise UnsupportedArchitecture(
                f"{head.file}: a last layer with {layer.activation!r} is not supported on tokens"
            )
        return layer
    if head.tensor is not None:
        return LinearLayer(Weights.open(head.file).array(head.tensor, (head.width, hidden_size)))
    weights = Weights.of_file(head.file)
    prefix = "multivector." if head.own else ""
    if weights.has(f"{prefix}bias"):
        return _linear(weights, prefix, (head.width, hidden_size))
    return LinearLayer(weights.array(f"{prefix}weight", (head.width, hidden_size)))


def activation_name(name: str, where: Path | str) -> str:
    """Return an activation's name ("gelu") from the name or a class path ("torch.nn.GELU"). Imports
    nothing."""
    plain = name.rsplit(".", 1)[-1].lower()
    plain = OTHER_NAMES.get(plain, plain)
    if plain not in ACTIVATIONS or (
        "." in name and not name.startswith(("torch.nn.", "transformers.activations."))
    ):
        raise UnsupportedArchitecture(
            f"{where}: activation {name!r}; supported: {', '.join(ACTIVATIONS)}"
        )
    return plain


def _linear(weights: Weights, prefix: str, shape: tuple[int, int]) -> LinearLayer:
    return LinearLayer(
        weights.array(f"{prefix}weight", shape), weights.array(f"{prefix}bias", shape[:1])
    )


EXACT, TANH = "gelu", "gelu_pytorch_tanh"
SETTINGS = (
    "hidden_act",
    "hidden_activation",
    "activation",
    "activation_function",
    "classifier_activation",
)


def with_tanh_gelu(spec: ModelSpec) -> ModelSpec:
    """Return the model with gelu replaced by its tanh form, in trunk and head."""
    kind = spec.kind
    if isinstance(kind, Labels):
        steps = tuple(
            replace(step, activation=TANH)
            if isinstance(step, LinearStep) and step.activation == EXACT
            else step
            for step in kind.head.steps
        )
        kind = replace(kind, head=replace(kind.head, steps=steps))
    return replace(spec, tanh_gelu=True, kind=kind)


def in_config(config: Any) -> None:
    """Set the tanh form of gelu in a configuration object of transformers."""
    for name in SETTINGS:
        if getattr(config, name, None) == EXACT:
            setattr(config, name, TANH)


def query_table(spec: ModelSpec) -> Floats | None:
    """Return the weights of query tokens, float32[v], or None if only the model makes queries.
    Raises LoadError, naming the file.

    A head without a table, whose queries use the collection's idf, gives all tokens the same
    weight. Weights averaged over many texts, or of each token alone, ranked worse
    (`conformance/quality/default_search.py --query-encoder table`).
    """
    head = spec.sparse
    if head is None or not head.can_look_up:
        return None
    source = head.queries
    if source is None:
        weights = np.ones(spec.vocab_size, dtype=np.float32)
        weights[sorted(spec.removed_ids)] = 0
        return weights
    if source.suffix == ".json":
        return _idf(source, spec)
    path = read_object(source / "config.json", optional=True).get("path")
    if isinstance(path, str):
        return _idf(inside(source.parent, path), spec)
    table = Weights.open(source)
    if table.names() != {"weight"} or len(table.shape("weight")) != 1:
        raise LoadError(
            f"{source}: should hold one row called `weight`, and holds {sorted(table.names())}"
        )
    weights = table.float32("weight")
    if len(weights) > spec.vocab_size:
        raise WeightMismatch(
            f"{source}: weighs {len(weights)} ids, the model has {spec.vocab_size}"
        )
    return np.concatenate([weights, np.zeros(spec.vocab_size - len(weights), dtype=np.float32)])


def _idf(file: Path, spec: ModelSpec) -> Floats:
    """Words missing from the vocabulary are skipped; tokens without a weight get 0."""
    weights = np.zeros(spec.vocab_size, dtype=np.float32)
    id_of = read_vocabulary(spec.folder)
    for word, weight in read_object(file).items():
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise LoadError(f"{file}: `{word}` is {weight!r}, should be a number")
        if id_of.get(word, spec.vocab_size) < spec.vocab_size:
            weights[id_of[word]] = weight
    return weights


# Name prefixes of head tensors in any family. `cls` and `lm_head`, left over from pre-training, may
# stay unused.
OF_HEADS = frozenset(
    {
        "classification_head",
        "classifier",
        "dense",
        "head",
        "linear",
        "out_proj",
        "pooler",
        "pre_classifier",
        "score",
        "regressor",
        "sequence_summary",
        "v_head",
    }
)


def classifier_layers(head: ClassifierHead, folder: Path, hidden_size: int) -> tuple[Layer, ...]:
    """Read a classifier's layers: one logit a label. Raises WeightMismatch or LoadError, naming the
    tensor."""
    if not head.trunk:
        return tuple(step_layer(step) for step in head.steps if isinstance(step, StepModule))
    reader = _Reader(folder, head.trunk)
    layers, width = list[Layer](), hidden_size
    name = ""
    for step in head.steps:
        assert isinstance(step, LinearStep | NormStep)
        name = step.name
        if isinstance(step, NormStep):
            layers.append(reader.norm(step, width))
        else:
            layers += reader.linear(step, width)
        # The next layer's input
        width = layers[-1].weight.shape[0]
    if width != len(head.labels):
        raise WeightMismatch(
            f"{folder}: `{name}` gives {width} logits, config.json names {len(head.labels)} labels"
        )
    unused = [
        name
        for name in sorted(reader.tensors.names() - reader.used)
        if not name.startswith(head.trunk) and name.partition(".")[0] in OF_HEADS
    ]
    if unused:
        raise WeightMismatch(
            f"{folder}: the weights hold what config.json does not describe: {unused[:5]}, "
            f"{len(unused)} in all"
        )
    return tuple(layers)


class _Reader:
    def __init__(self, folder: Path, trunk: str) -> None:
        self.tensors = Weights.open(folder)
        self.used = set[str]()
        self._folder = folder
        self._trunk = trunk

    def linear(self, step: LinearStep, width: int) -> list[LinearLayer]:
        weight = self._tensor(f"{step.name}.weight", (None, width), step.rows)
        bias = None
        if step.bias:
            size = None if step.rows else len(weight)
            bias = self._tensor(f"{step.name}.bias", (size,), step.rows)
        if step.rows is None:
            activation = activation_name(step.activation, self._folder / "config.json")
            return [LinearLayer(weight, bias, activation)]
        # The logit of one row, or the difference of two rows' logits
        difference = np.array([[1, -1]], np.float32)[:, : len(weight)]
        if step.cap is None:
            combined = np.float32(step.scale) * difference
            return [LinearLayer(combined @ weight, None if bias is None else combined @ bias)]
        share = np.float32(step.scale / step.cap)
        capped = LinearLayer(share * weight, None if bias is None else share * bias, "tanh")
        return [capped, LinearLayer(np.float32(step.cap) * difference)]

    def norm(self, step: NormStep, width: int) -> NormLayer:
        weight = self._tensor(f"{step.name}.weight", (width,))
        return NormLayer(
            weight, self._tensor(f"{step.name}.bias", (width,)) if step.bias else None, step.eps
        )

    def _tensor(
        self, name: str, shape: tuple[int | None, ...], rows: tuple[int, int | None] | None = None
    ) -> NDArray[np.float32]:
        # The trunk may have been saved without its prefix
        bare = name.removeprefix(self._trunk)
        key = self.tensors.checked(name, shape, name if self.tensors.has(name) else bare)
        self.used.add(key)
        if rows is None:
            return self.tensors.float32(key)
        count = self.tensors.shape(key)[0]
        if max(row or 0 for row in rows) >= count:
            raise WeightMismatch(
                f"{self._folder}: `{key}` has {count} rows, the model needs {list(rows)}"
            )
        return self.tensors.rows(key, [row for row in rows if row is not None])
