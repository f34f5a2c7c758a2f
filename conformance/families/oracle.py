"""The distance of an engine's states and vectors of a tiny checkpoint from transformers', for texts
alone and in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.small import tiny
from conformance.small.tolerances import INT8
from hybridtei.batch import Encoding, Head, pack
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.weights import graph_tensors
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats

ENGINES = ("ort", "openvino", "torch")
ENGINES_OF = {"float32": ENGINES, "bfloat16": ("openvino", "torch"), "int8": ("ort", "openvino")}
# Numbers that share a scale on OpenVINO; the tiny checkpoints are too narrow for the groups of
# `openvino_int8`
INT8_GROUP = 16
# Tokens; beyond the windows and the buckets of the tiny families
LENGTHS = (1, 3, 40, 17, 100)
# Of a further text, if the model takes as many positions
LONG = 1500
# Of float32 hidden states, relative to the largest
HIDDEN_TOLERANCE = 3e-6
# Of the elements of unit vectors
VECTOR_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of the deviation of hidden states, relative to the largest, and of unit vectors'
    elements."""

    hidden: float
    vectors: float


TOLERANCES = {
    "float32": Tolerance(HIDDEN_TOLERANCE, VECTOR_TOLERANCE),
    "bfloat16": Tolerance(0.05, 0.015),
    "int8": Tolerance(0.12 * INT8, 0.03 * INT8),
}


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states float32[t, h] of texts that are computed in one batch, and of each alone."""

    together: Floats
    alone: Floats


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest of hidden states, relative to the largest state, and of the elements of unit
    vectors."""

    hidden: float
    vectors: float

    @property
    def is_within(self) -> bool:
        """True if both are within float32's tolerance."""
        return self.within(TOLERANCES["float32"])

    def within(self, tolerance: Tolerance) -> bool:
        """Whether both are within a tolerance; NaN is not."""
        return self.hidden <= tolerance.hidden and self.vectors <= tolerance.vectors


def texts_of(spec: ModelSpec) -> list[Encoding]:
    """Seeded ids of LENGTHS, and of LONG if the model takes it."""
    random = np.random.default_rng(0)
    lowest = max(spec.positions.offset, 3)
    takes_long = (spec.config.get("max_position_embeddings") or 0) >= LONG
    lengths = (*LENGTHS, LONG) if takes_long else LENGTHS
    return [Encoding(random.integers(lowest, spec.vocab_size, length)) for length in lengths]


def open_engine(name: str, spec: ModelSpec, dtype: str = "float32") -> Backend:
    """A checkpoint's family on one of ENGINES_OF a dtype, without a guard. Raises LoadError, or
    ImportError if the engine is not installed."""
    if name == "torch":
        from hybridtei.inference.backends.torch.backend import TorchBackend

        return TorchBackend(spec, dtype=dtype)
    graph, weights = family_graph(spec), Weights.open(spec.folder)
    if name == "openvino":
        from hybridtei.inference.backends.graph.openvino_backend import OpenVinoBackend
        from hybridtei.inference.backends.graph.openvino_model import Int8Form

        return OpenVinoBackend(spec, graph, weights, dtype=dtype, int8=Int8Form(INT8_GROUP))
    from hybridtei.inference.backends.graph.int8 import int8_family_graph, max_weight
    from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend

    if dtype == "int8":
        graph = int8_family_graph(spec, graph_tensors(graph, weights), max_weight())
    return OnnxBackend(spec, graph, weights)


def reference(folder: Path, texts: Sequence[Encoding]) -> Floats:
    """Hidden states float32[t, h] by transformers and its eager attention, a text at a time."""
    return np.concatenate(alone(tiny.model_of(folder), texts))


def alone(model: Any, texts: Sequence[Encoding], output: str = "last_hidden_state") -> list[Floats]:
    """What a model of transformers gives for each text, by itself."""
    with torch.inference_mode():
        outputs = [model(input_ids=torch.tensor(text.input_ids)[None]) for text in texts]
    return [getattr(one, output)[0].numpy() for one in outputs]


def states_of(backend: Backend, texts: Sequence[Encoding]) -> States:
    """The states that a backend computes."""
    return States(
        _hidden(backend, texts), np.concatenate([_hidden(backend, [text]) for text in texts])
    )


def difference(states: States, expected: Floats, texts: Sequence[Encoding]) -> Difference:
    """The worse of together and alone."""
    found = [states.together, states.alone]
    hidden = max_difference(found, expected) / float(np.abs(expected).max())
    return Difference(
        hidden,
        max_difference([unit_means(one, texts) for one in found], unit_means(expected, texts)),
    )


def max_difference(found: Sequence[Floats], expected: Floats) -> float:
    """The largest difference of any element; NaN where there is one."""
    return float(np.abs(np.stack(found) - expected).max())


def unit_means(hidden: Floats, texts: Sequence[Encoding]) -> Floats:
    """Mean-pooled vectors of length 1: float32[t, h] -> float32[n, h]."""
    means = np.stack(
        [rows.mean(0) for rows in np.split(hidden, np.cumsum([len(text) for text in texts])[:-1])]
    )
    return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True), dtype=np.float32)


def _hidden(backend: Backend, texts: Sequence[Encoding]) -> Floats:
    tokens = backend.forward(
        pack([*texts], frozenset({Head.TOKENS}), backend.spec.positions)
    ).tokens
    return tokens.values
