"""Fewer launches of a family: the same states to the last digits, from fewer operations; and how
many a pass has, on fake tensors."""

import numpy as np
import pytest
import torch

from conformance.load import launches
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.fusing import is_product, sum_inside
from hybridtei.inference.backends.torch.kernels import flash, padded_groups
from hybridtei.inference.backends.torch.ops import TorchOps
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import random_encodings, states
from tests.inference.backends.torch.attention import libraries
from tests.inference.backends.torch.test_no_sync import CASES
from tests.near import same
from tests.sampled import paired

# Relative to the largest state: sums in another order, and biases moved from products to norms
EQUAL = 2e-6
DEVICE = "cuda" if torch.backends.cuda.is_built() else "meta"
TRUNKS = [name for name, (_, pooling) in CASES.items() if pooling == "mean"]


# Largest deviation of half precision by a GPU's kernels from half precision by SDPA for each text
NEAR = {"float16": 2e-2, "bfloat16": 1e-1}
LIBRARY = libraries.installed()


def drawn_states(backend):
    return states(backend, random_encodings(backend.spec, (9, 1, 33, 2))).values


def joined(case, folder, monkeypatch, dtype="float32"):
    """A case as a CPU computes it, and with fewer products."""
    write, pooling = CASES[case]
    spec = read_spec(write(folder), pooling=pooling)
    plain = TorchBackend(spec, dtype=dtype)
    monkeypatch.setattr(TorchOps, "joins", True)
    backend = TorchBackend(spec, dtype=dtype)
    sum_inside(backend.trunk.model)
    return plain, backend


@pytest.mark.parametrize("case", [*TRUNKS, "adapters"])
def test_a_family_keeps_its_states_with_fewer_products(tmp_path, monkeypatch, case):
    plain, backend = joined(case, tmp_path, monkeypatch)
    before, after = (sum(map(is_product, one.trunk.model.graph.nodes)) for one in (plain, backend))
    assert after < before
    exact, found = drawn_states(plain), drawn_states(backend)
    assert np.abs(found - exact).max() <= EQUAL * np.abs(exact).max()
    # No pass changes a weight
    same(drawn_states(backend), found)


@pytest.mark.parametrize(("case", "dtype"), paired([*TRUNKS, "adapters"], [*NEAR]))
def test_a_family_in_half_precision_by_a_gpus_kernels_is_near_that_of_a_cpu(
    tmp_path, monkeypatch, case, dtype
):
    plain, backend = joined(case, tmp_path, monkeypatch, dtype)
    exact = drawn_states(plain)
    has_bias = any(has_bias for _, has_bias in backend.trunk.forms)
    backend.trunk.kernel = padded_groups if has_bias else flash
    found = drawn_states(backend)
    assert np.isfinite(found).all()
    assert np.abs(found - exact).max() <= NEAR[dtype] * np.abs(exact).max()


# Model -> launches of a pass of 32 texts, and of a further group
BOUNDS = {
    "BERT-base": (120, 0),
    "MPNet": (180, 17),
    "T5-base": (180, 17),
    "DeBERTa-v3": (250, 60),
    "Jina-v2": (200, 17),
    "Qwen3-0.6B": (600, 0),
}
# Without torch's build for CUDA their norms are several operations each
FUSED_NORMS = {"T5-base", "Qwen3-0.6B"} if DEVICE == "meta" else set()


@pytest.mark.parametrize("name", sorted({*BOUNDS} - FUSED_NORMS))
def test_a_pass_has_few_launches(name):
    most, further = BOUNDS[name]
    equal = launches.launches(name, [50] * 32, DEVICE).total()
    mixed = launches.launches(name, [50] * 32 + [200] * 8, DEVICE).total()
    assert equal <= most
    assert mixed - equal <= further


@pytest.mark.parametrize("lengths", [[50] * 328, [512] * 32, [5] * 3277, [8000, 8000, 384]])
def test_maxima_over_a_vocabulary_have_few_launches(lengths):
    assert launches.splade_launches(lengths, DEVICE) < 30


def test_queries_with_expansion_and_long_documents_share_a_pass():
    name = "ModernBERT-base"
    documents = launches.launches(name, [200] * 8, DEVICE).total()
    mixed = launches.launches(name, [40] + [200] * 7, DEVICE, unseen=8).total()
    assert mixed <= documents + 60
