"""Small weight files: the same float32 arrays from either format and every precision."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hybridtei.checkpoint.weights import read_arrays, read_linear
from hybridtei.errors import LoadError, MissingArtifact

STORED = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize("stored", STORED)
def test_every_precision_becomes_single(tmp_path: Path, suffix: str, stored: torch.dtype) -> None:
    tensors = {"weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(stored)}
    arrays = read_arrays(write(tmp_path / f"head{suffix}", tensors))
    assert set(arrays) == {"weight"}
    assert arrays["weight"].dtype == np.float32
    np.testing.assert_array_equal(arrays["weight"], tensors["weight"].float().numpy())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_linear_layer_is_weight_and_bias_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    pair = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    assert set(read_linear(write(tmp_path / f"one{suffix}", pair))) == {"weight", "bias"}
    with pytest.raises(LoadError, match=rf"two\{suffix}.*extra"):
        read_linear(write(tmp_path / f"two{suffix}", {**pair, "extra": torch.ones(1)}))


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.bin"])
def test_a_file_that_is_missing_or_junk_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(MissingArtifact, match=f"{tmp_path}/{name}"):
        read_arrays(tmp_path / name)
    (tmp_path / name).write_bytes(b"junk" * 20)
    with pytest.raises(LoadError, match=f"{tmp_path}/{name}: (cannot be read as weights|was saved by torch before)"):
        read_arrays(tmp_path / name)


def test_neither_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"weight": torch.ones(1, 2)}
    one, other = write(tmp_path / "x.safetensors", tensors), write(tmp_path / "x.pt", tensors)
    real = builtins.__import__

    def without_torch(name: str, *rest: Any) -> Any:
        if name == "torch" or name.startswith("torch."):
            raise ImportError("no torch here")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    for file in (one, other):
        np.testing.assert_array_equal(read_arrays(file)["weight"], np.ones((1, 2)))
