"""Families by torch: products in eight bits, and biases that are made a part at a time."""

import numpy as np
import pytest

from conformance.small import tiny
from hybridtei.batch import Encoding
from hybridtei.inference.backends.torch import kernels
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.fp8 import quantised, to_eight_bits
from tests.inference.backends.outputs import random_encodings
from tests.inference.backends.torch.test_trunk import hidden_of
from tests.near import near

# Another order of sums
EQUAL = 2e-6


def test_rows_that_several_matrices_multiply_become_eight_bits_once(tmp_path):
    backend = TorchBackend(tiny.family_spec(tmp_path, "bert"))
    encodings = random_encodings(backend.spec)
    exact = hidden_of(backend, encodings)
    model = backend.trunk.model
    # Of two layers: query, key, value and output; two of the MLP
    assert to_eight_bits(model) == 2 * 6
    assert sum(node.target is quantised for node in model.graph.nodes) == 2 * 4
    for ours, theirs in zip(hidden_of(backend, encodings), exact, strict=True):
        assert 0 < np.abs(ours - theirs).max() < 1


def equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs, EQUAL * np.abs(theirs).max())


BIASED = ["deberta-v2", "mpnet", "t5"]


@pytest.mark.parametrize("entries", [kernels.MASK_ENTRIES, 200], ids=["groups", "long alone"])
@pytest.mark.parametrize("model_type", BIASED)
@pytest.mark.parametrize("unseen", [0, 3])
def test_a_bias_of_groups_is_that_of_each_text(tmp_path, model_type, entries, unseen, monkeypatch):
    """As a GPU computes them; the bias is made once for texts of one length."""
    backend = TorchBackend(tiny.family_spec(tmp_path, model_type))
    draw = np.random.default_rng(0)
    encodings = [
        Encoding(draw.integers(5, backend.spec.vocab_size, length + unseen), unseen=unseen)
        for length in (1, 9, 4, 23, 2, 17, 8, 16, 1, 17)
    ]
    alone = hidden_of(backend, encodings)
    monkeypatch.setattr(kernels, "MASK_ENTRIES", entries)
    backend.trunk.kernel = kernels.padded_groups
    equal(hidden_of(backend, encodings), alone)


@pytest.mark.parametrize("model_type", ["deberta-v2", "mpnet"])
def test_a_bias_of_some_queries_at_a_time_is_the_same(tmp_path, model_type, monkeypatch):
    backend = TorchBackend(tiny.family_spec(tmp_path, model_type))
    encodings = random_encodings(backend.spec)
    whole = hidden_of(backend, encodings)
    monkeypatch.setattr(kernels, "BIAS_ENTRIES", 1000)
    equal(hidden_of(backend, encodings), whole)
