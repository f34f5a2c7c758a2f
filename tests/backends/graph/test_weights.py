"""Matrices that were widened for a runtime: given back where it has packed them, kept where it reads them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridtei.backends.graph.onnx_backend import OnnxBackend
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.graph.weights import discard_widened, graph_tensors
from hybridtei.batch import Head, pack
from hybridtei.checkpoint.spec import read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from tests import tiny
from tests.backends.outputs import random_encodings

MATRIX = "layers.0.mlp.up_proj.weight"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages become zeros on Linux alone")


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 whose matrices fill pages."""
    folder = tiny.write_family(tmp_path_factory.mktemp("halved"), "qwen3", hidden_size=128, intermediate_size=512)
    return tiny.change(folder, lambda tensors: {name: one.to(torch.bfloat16) for name, one in tensors.items()})


@pytest.fixture(scope="module")
def widened(halved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers in float32, which nothing has to widen."""
    folder = shutil.copytree(halved, tmp_path_factory.mktemp("widened") / "copy")
    return tiny.change(folder, lambda tensors: {name: one.float() for name, one in tensors.items()})


def states(folder: Path) -> Floats:
    spec = read_spec(folder, pooling="mean")
    backend = OnnxBackend(spec, family_graph(spec), Weights.open(folder))
    batch = pack(random_encodings(spec), frozenset({Head.TOKENS}), spec.positions)
    found = [backend.forward(batch, use_all_cores=wide).tokens for wide in (False, True)]
    assert all(one is not None for one in found)
    return np.stack([one.values for one in found if one is not None])


def test_vectors_are_those_of_the_widened_checkpoint(halved: Path, widened: Path) -> None:
    np.testing.assert_array_equal(states(halved), states(widened))


def discarded(folder: Path, computed: Callable[[dict[str, Floats]], list[Floats]]) -> dict[str, Floats]:
    spec, weights = read_spec(folder, pooling="mean"), Weights.open(folder)
    graph = family_graph(spec)
    tensors = graph_tensors(graph, weights)
    assert MATRIX in graph.matrices
    discard_widened(graph, tensors, weights, lambda: computed(tensors))
    return tensors


def test_what_is_not_read_is_given_back(halved: Path) -> None:
    tensors = discarded(halved, lambda tensors: [np.ones(3, np.float32)])
    assert np.mean(tensors[MATRIX] == 0) > 0.9
    assert tensors["embed_tokens.weight"].all()


def test_what_is_read_stays(halved: Path) -> None:
    tensors = discarded(halved, lambda tensors: [tensors[MATRIX][200].copy()])
    np.testing.assert_array_equal(tensors[MATRIX], Weights.open(halved).float32(MATRIX))


def test_what_was_not_widened_is_the_file(widened: Path) -> None:
    def computed(tensors: dict[str, Floats]) -> list[Floats]:
        raise AssertionError("there is nothing to try")

    tensors = discarded(widened, computed)
    np.testing.assert_array_equal(tensors[MATRIX], Weights.open(widened).float32(MATRIX))
