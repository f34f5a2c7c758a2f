"""What travels between host and device arrives as it left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.host_copy import by_kind, joined, of_its_own, parted, start_copy, to_device

CPU = torch.device("cpu")
SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5)


@given(SHAPES)
def test_joined_and_parted_again(shapes: list[list[int]]) -> None:
    tensors = {f"{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    flat = joined([*tensors.values()], torch.float32).numpy()
    assert flat.shape == (sum(tensor.numel() for tensor in tensors.values()),)
    found = parted(flat, {name: tensor.shape for name, tensor in tensors.items()})
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


def test_half_precision_leaves_as_single() -> None:
    found = start_copy({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.arange(3)}, CPU)()
    assert found["a"].dtype == np.float32
    assert found["b"].dtype == np.int64


def test_each_precision_travels_as_it_is() -> None:
    found = {
        "a": torch.ones(2),
        "b": torch.ones(3, dtype=torch.float16),
        "c": torch.arange(2, dtype=torch.int32),
        "d": torch.ones(1, dtype=torch.float16),
        "e": torch.arange(2),
    }
    assert by_kind(found) == {torch.float32: ["a"], torch.float16: ["b", "d"], torch.int64: ["c", "e"]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_what_arrived_becomes_single_precision_without_a_change_and_of_its_own(dtype: torch.dtype) -> None:
    arrived = (1000 * torch.randn(50, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = of_its_own(arrived)
    assert found.dtype == (np.int64 if dtype == torch.int64 else np.float32)
    assert torch.equal(torch.as_tensor(found).to(dtype), arrived)
    arrived.zero_()
    assert found.any()


def test_on_a_cpu_nothing_is_copied() -> None:
    ids = np.arange(5)
    assert np.shares_memory(to_device({"ids": ids}, CPU)["ids"].numpy(), ids)
    states = torch.randn(4)
    assert np.shares_memory(start_copy({"states": states}, CPU)()["states"], states.numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_and_back_on_a_gpu() -> None:
    device = torch.device("cuda")
    arrays = {"ids": np.arange(7), "offsets": np.array([0, 3, 7])}
    there = to_device(arrays, device)
    half = {**there, "half": torch.full((2, 2), 0.5, dtype=torch.float16, device=device)}
    found = start_copy(half, device)()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    np.testing.assert_array_equal(found["half"], np.full((2, 2), 0.5, dtype=np.float32))
