"""Families by torch: what is joined, and biases that are made a part at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from hybridtei.backends.heads import HeadLayers
from hybridtei.backends.torch import kernels
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.fp8 import to_eight_bits
from hybridtei.backends.torch.load import load_family
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from tests import tiny
from tests.backends.outputs import random_encodings
from tests.backends.torch.test_trunk import hidden_of
from tests.sampled import sampled

EQUAL = 2e-6  # another order of sums


def opened(spec: ModelSpec, *, joined: bool) -> TorchBackend:
    trunk, _ = load_family(spec, torch.float32, torch.device("cpu"), joined=joined)
    return TorchBackend(spec, loaded=(trunk, HeadLayers()))


def linears(backend: TorchBackend) -> int:
    return sum(node.target is linear for node in backend.trunk.model.graph.nodes)


@pytest.mark.parametrize("model_type", sampled(tiny.FAMILIES, (*tiny.QUICK, "t5", "deberta-v2")))
def test_joined_projections_compute_the_same(tmp_path: Path, model_type: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    apart, joined = opened(spec, joined=False), opened(spec, joined=True)
    has_one_already = {"modernbert", "gte", "jina_embeddings_v3"}
    assert (linears(joined) < linears(apart)) == (model_type not in has_one_already)
    encodings = random_encodings(spec)
    for ours, theirs in zip(hidden_of(joined, encodings), hidden_of(apart, encodings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=EQUAL, rtol=EQUAL)


def test_eight_bits_take_the_joined_matrix(tmp_path: Path) -> None:
    backend = opened(read_spec(tiny.write_family(tmp_path, "bert"), pooling="mean"), joined=True)
    encodings = random_encodings(backend.spec)
    exact = hidden_of(backend, encodings)
    assert to_eight_bits(backend.trunk.model) == 2 * 4  # of two layers: query, key and value; output; two of the MLP
    for ours, theirs in zip(hidden_of(backend, encodings), exact, strict=True):
        assert 0 < np.abs(ours - theirs).max() < 1


@pytest.mark.parametrize("model_type", ["deberta-v2", "mpnet"])
def test_a_bias_of_some_queries_at_a_time_is_the_same(tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend(read_spec(tiny.write_family(tmp_path, model_type), pooling="mean"))
    encodings = random_encodings(backend.spec)
    whole = hidden_of(backend, encodings)
    monkeypatch.setattr(kernels, "BIAS_ENTRIES", 1000)
    for ours, theirs in zip(hidden_of(backend, encodings), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=EQUAL * np.abs(theirs).max(), rtol=EQUAL)
