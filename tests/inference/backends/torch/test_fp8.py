"""Eight bits for the matrices of a trunk: the arithmetic against float32, tokens by themselves, and
the guard."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from conformance.small import tiny
from hybridtei.errors import LoadError
from hybridtei.inference.backends.fidelity import Guard
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.fp8 import (
    EIGHT_BITS,
    emulated,
    judged,
    product,
    quantised,
    to_eight_bits,
)
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import columns_of, on_gpu, run, sixty_four

LOOSE = Guard(worst=0.9, mean=0.95)
# Of a number in e4m3: three bits of fraction, rounded
RELATIVE = 2**-4


def rows(count, width, seed=0, scale=1.0):
    return scale * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99), st.sampled_from([1e-6, 1.0, 1e4]))
def test_each_number_keeps_its_first_digits(count, width, seed, scale):
    exact = rows(count, width, seed, scale)
    eight, scales = quantised(exact)
    assert eight.dtype == EIGHT_BITS
    found = eight.float() * scales
    largest = exact.abs().amax(1, keepdim=True)
    assert ((found - exact).abs() <= RELATIVE * exact.abs() + 2**-9 / 448 * largest + 1e-12).all()
    torch.testing.assert_close(found.abs().amax(1, keepdim=True), largest)


def test_a_row_of_zeros_stays_one_and_nothing_overflows():
    assert not (quantised(torch.zeros(2, 16))[0].float()).any()
    assert quantised(torch.full((1, 16), 3e38))[0].float().isfinite().all()


def test_a_row_is_quantised_by_itself():
    exact = rows(5, 32)
    exact[2] *= 1000
    for i in range(5):
        alone, beside = quantised(exact[i : i + 1]), quantised(exact)
        assert torch.equal(alone[0].float(), beside[0][i : i + 1].float())
        assert torch.equal(alone[1], beside[1][i : i + 1])


def test_torchs_own_scaled_product_computes_the_same():
    """The function that a GPU is called with, on a CPU."""
    x, weight = quantised(rows(32, 64)), quantised(rows(48, 64, 1))
    try:
        found = torch._scaled_mm(
            x[0], weight[0].t(), scale_a=x[1], scale_b=weight[1].t(), out_dtype=torch.bfloat16
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has it for GPUs only: {error}")
    torch.testing.assert_close(found.float(), emulated(*x, *weight), atol=0.1, rtol=2**-7)


class Two(nn.Module):
    """A product whose shape allows eight bits, computed twice, and one whose does not."""

    def __init__(self, *, bias):
        super().__init__()
        self.a, self.b = nn.Parameter(rows(32, 32, 1)), nn.Parameter(rows(30, 32, 2))
        self.bias = nn.Parameter(rows(1, 32, 3)[0]) if bias else None

    def forward(self, x):
        twice = functional.linear(functional.linear(x, self.a, self.bias), self.a, self.bias)
        return functional.linear(twice, self.b, None)


@pytest.mark.parametrize("bias", [True, False])
def test_only_matrices_of_fitting_sides_are_replaced_and_shape_bias_and_precision_stay(
    bias,
):
    model = fx.symbolic_trace(Two(bias=bias).to(torch.bfloat16))
    x = rows(6, 32).to(torch.bfloat16)
    with torch.inference_mode():
        exact = model(x)
        assert to_eight_bits(model) == 1
        found = model(x)
    assert model.a.dtype == EIGHT_BITS
    assert model.b.dtype == torch.bfloat16
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    assert 0 < (found - exact).norm() / exact.norm() < 0.1


def test_a_model_keeps_its_vectors(tmp_path):
    spec = tiny.family_spec(tmp_path, "qwen3", seed=1)
    backend = judged(TorchBackend(spec, dtype="bfloat16"), LOOSE)
    assert backend.dtype == "fp8"
    assert EIGHT_BITS in {tensor.dtype for tensor in backend.trunk.model.buffers()}


def test_neighbours_change_next_to_nothing(hybrid):
    backend = judged(TorchBackend(read_spec(hybrid), dtype="bfloat16"), LOOSE)
    texts = sixty_four(backend.spec.vocab_size)[:16]
    together = run(backend, texts)
    for place, text in enumerate(texts):
        alone, beside = (
            columns_of(run(backend, [text]), 0)["dense"],
            columns_of(together, place)["dense"],
        )
        assert alone @ beside / np.linalg.norm(alone) / np.linalg.norm(beside) > 0.999


def test_a_model_that_loses_too_much_is_refused_with_the_figures(bert):
    with pytest.raises(
        LoadError, match=r"fp8 is too far.*0\.\d+ at worst.*asked for: 1\.1 at worst"
    ):
        judged(TorchBackend(read_spec(bert), dtype="bfloat16"), Guard(worst=1.1))


@on_gpu
def test_the_gpus_product_is_the_emulated_one():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    x, weight = (
        [part.cuda() for part in quantised(rows(*shape))] for shape in ((33, 64, 0), (48, 64, 1))
    )
    torch.testing.assert_close(
        product(*x, *weight, torch.bfloat16).float(), emulated(*x, *weight), atol=0.1, rtol=2**-7
    )


def test_a_gpu_takes_the_products_arguments():
    """As torch's own checks of shapes, types and names say, without a GPU."""
    with FakeTensorMode():
        rows, weight = (torch.empty(n, 32, device="cuda", dtype=EIGHT_BITS) for n in (16, 64))
        scales = (torch.empty(n, 1, device="cuda") for n in (16, 64))
        found = product(rows, next(scales), weight, next(scales), torch.bfloat16)
    assert (tuple(found.shape), found.dtype, found.device.type) == (
        (16, 64),
        torch.bfloat16,
        "cuda",
    )
