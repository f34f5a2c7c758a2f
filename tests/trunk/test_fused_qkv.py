"""Query, key and value by one product: the same numbers, in whatever order and from whatever thread they are asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hybridtei.backends.fp8_linear import Fp8Linear, replace_linears
from hybridtei.backends.torch_backend import TorchBackend
from hybridtei.checkpoint.spec import read_spec
from hybridtei.trunk.families import PACKED
from hybridtei.trunk.fused_qkv import First, Later, fuse
from tests import tiny
from tests.trunk.test_pretrained import hidden_of, random_encodings

EQUAL = 1e-6


class Three(nn.Module):
    """An attention's projections; fewer heads for keys and values."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, width, bias=bias) for width in (32, 16, 16))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


@pytest.mark.parametrize("model_type", sorted(PACKED))
def test_every_family_computes_the_same(tmp_path: Path, model_type: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    apart, joined = TorchBackend(spec), TorchBackend(spec)
    made = fuse(joined.trunk.model)
    assert made == (0 if model_type == "modernbert" else 2)  # ModernBERT's are one already
    encodings = random_encodings(spec)
    for ours, theirs in zip(hidden_of(joined, encodings), hidden_of(apart, encodings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=EQUAL, rtol=EQUAL)


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_instead_of_three_and_nothing_is_kept(bias: bool) -> None:
    three, x = Three(bias), torch.randn(5, 16)
    expected = three(x)
    assert fuse(three) == 1
    products = []
    three.q_proj.all.register_forward_hook(lambda *_: products.append(1))
    for ours, theirs in zip(three(x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=EQUAL, rtol=EQUAL)
    assert len(products) == 1
    assert three.q_proj.held is None


def test_any_order_and_any_tensor() -> None:
    three, x, y = Three(), torch.randn(5, 16), torch.randn(2, 16)
    (_, key, value), (query, _, other) = three(x), three(y)
    fuse(three)
    torch.testing.assert_close(three.v_proj(x), value, atol=EQUAL, rtol=EQUAL)
    torch.testing.assert_close(three.q_proj(y), query, atol=EQUAL, rtol=EQUAL)
    torch.testing.assert_close(three.k_proj(x), key, atol=EQUAL, rtol=EQUAL)
    torch.testing.assert_close(three.v_proj(y), other, atol=EQUAL, rtol=EQUAL)


def test_threads_do_not_mix_their_parts() -> None:
    three = Three()
    inputs = [torch.randn(3, 16) for _ in range(200)]
    expected = [three(x) for x in inputs]
    fuse(three)
    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(three, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=EQUAL, rtol=EQUAL)


def test_what_does_not_fit_together_is_left_alone() -> None:
    three = Three()
    three.v_proj = nn.Linear(16, 16, bias=False)
    assert fuse(three) == 0
    assert type(three.q_proj) is nn.Linear
    replaced = Three()
    replace_linears(replaced)
    assert fuse(replaced) == 0


def test_eight_bits_take_the_joined_matrix() -> None:
    three, x = Three(), torch.randn(4, 16)
    apart = Three()
    apart.load_state_dict(three.state_dict())
    fuse(three)
    (layer,) = replace_linears(three)
    assert isinstance(three.q_proj, First)
    assert isinstance(three.k_proj, Later)
    assert three.q_proj.all is layer
    assert len(replace_linears(apart)) == 3
    for ours, theirs in zip(three(x), apart(x), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # a scale a row: the same eight bits
    assert [type(module) for module in three.modules()].count(Fp8Linear) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_checkpoint_is_loaded_with_joined_products(bert: Path) -> None:
    spec = read_spec(bert)
    assert any(isinstance(module, First) for module in TorchBackend(spec, device="cuda").trunk.model.modules())
    assert not any(isinstance(module, First) for module in TorchBackend(spec).trunk.model.modules())
