"""Head files become tensors of the declared shape, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridtei.backends.torch.load import ACTIVATIONS, dense_layer, lexical_weights, multivector_weights
from hybridtei.checkpoint.heads import MultivectorHead, SparseHead, find_multivector_head, find_sparse_head
from hybridtei.checkpoint.layers import activation_name
from hybridtei.checkpoint.modules import DenseModule
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from tests import tiny

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.mark.parametrize("name", ["gelu", "torch.nn.modules.activation.GELU", "torch.nn.GELU"])
def test_an_activation_has_a_plain_name_or_that_of_a_torch_class(name: str) -> None:
    x = torch.linspace(-3, 3, 20)
    assert torch.equal(ACTIVATIONS[activation_name(name, "file")](x), torch.nn.functional.gelu(x))


@pytest.mark.parametrize("name", ["os.system", "evil.Tanh", "torch.nn.modules.activation.Softsign", "Tanh ", ""])
def test_no_other_activation_is_taken_and_nothing_is_imported(name: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"here/config\.json") as caught:
        activation_name(name, "here/config.json")
    assert all(known in str(caught.value) for known in ACTIVATIONS)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_a_linear_head_comes_in_the_trunks_precision(tmp_path: Path, suffix: str, stored: torch.dtype) -> None:
    tiny.write_linear(tmp_path / f"sparse_linear{suffix}", 1, dtype=stored)
    tiny.write_linear(tmp_path / f"colbert_linear{suffix}", 5, dtype=stored)
    sparse, many = find_sparse_head(tmp_path, tiny.HIDDEN), find_multivector_head(tmp_path, tiny.HIDDEN)
    assert sparse is not None
    assert many is not None
    weights = lexical_weights(sparse, tiny.HIDDEN, torch.bfloat16, CPU)
    matrix, bias = multivector_weights(many, tiny.HIDDEN, torch.bfloat16, CPU)
    assert weights.out_weight.shape == (1, tiny.HIDDEN)
    assert weights.hidden_weight is None
    assert matrix.shape == (5, tiny.HIDDEN)
    assert bias is not None
    assert {weights.out_weight.dtype, weights.out_bias.dtype, matrix.dtype, bias.dtype} == {torch.bfloat16}


def test_our_own_file_holds_both_heads(tmp_path: Path) -> None:
    written = tiny.write_own_heads(tmp_path)
    sparse, many = find_sparse_head(tmp_path, tiny.HIDDEN), find_multivector_head(tmp_path, tiny.HIDDEN)
    assert sparse is not None
    assert many is not None
    weights = lexical_weights(sparse, tiny.HIDDEN, F32, CPU)
    assert weights.hidden_weight is not None
    assert torch.equal(weights.hidden_weight, written["sparse.hidden.weight"])
    assert torch.equal(weights.out_bias, written["sparse.out.bias"])
    matrix, bias = multivector_weights(many, tiny.HIDDEN, F32, CPU)
    assert torch.equal(matrix, written["multivector.weight"])
    assert bias is None


def test_our_own_file_may_hold_a_linear_sparse_head_and_a_bias(tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    tensors = {"sparse.out.weight": torch.ones(1, tiny.HIDDEN), "sparse.out.bias": torch.ones(1)}
    save_file({**tensors, "multivector.weight": torch.ones(3, tiny.HIDDEN), "multivector.bias": torch.ones(3)}, file)
    assert lexical_weights(SparseHead("linear", file, own=True), tiny.HIDDEN, F32, CPU).hidden_weight is None
    matrix, bias = multivector_weights(MultivectorHead(file, 3, own=True), tiny.HIDDEN, F32, CPU)
    assert matrix.shape == (3, tiny.HIDDEN)
    assert bias is not None


@pytest.mark.parametrize("stem", ["sparse_linear", "colbert_linear", "heads"])
@pytest.mark.parametrize("act", [None, "gelu"])
def test_our_own_file_may_have_any_name(tmp_path: Path, stem: str, act: str | None) -> None:
    inputs, width = (["hidden"], tiny.HIDDEN) if act is None else (["hidden", "embedding"], 8)
    written = tiny.write_own_heads(tmp_path, width=width, inputs=inputs, sparse={"inputs": inputs, "activation": act})
    file = (tmp_path / "hybridtei_heads.safetensors").rename(tmp_path / f"{stem}.safetensors")
    sparse, many = (find(tmp_path / "elsewhere", tiny.HIDDEN, file) for find in (find_sparse_head, find_multivector_head))
    assert isinstance(sparse, SparseHead)
    assert isinstance(many, MultivectorHead)
    assert torch.equal(lexical_weights(sparse, tiny.HIDDEN, F32, CPU).out_weight, written["sparse.out.weight"])
    assert torch.equal(multivector_weights(many, tiny.HIDDEN, F32, CPU)[0], written["multivector.weight"])


@pytest.mark.parametrize("lost", ["sparse.hidden.weight", "sparse.hidden.bias", "sparse.out.weight", "sparse.out.bias"])
def test_a_tensor_missing_from_our_file_is_named(tmp_path: Path, lost: str) -> None:
    tensors = tiny.write_own_heads(tmp_path)
    file = tmp_path / "hybridtei_heads.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file)
    with pytest.raises(LoadError, match=lost) as caught:
        lexical_weights(SparseHead("mlp", file, ("hidden", "embedding"), "gelu", own=True), tiny.HIDDEN, F32, CPU)
    assert str(file) in str(caught.value)


def test_a_perceptron_made_for_other_inputs_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tiny.write_own_heads(tmp_path, inputs=("hidden",))
    head = SparseHead("mlp", tmp_path / "hybridtei_heads.safetensors", ("hidden", "embedding"), "gelu", own=True)
    with pytest.raises(WeightMismatch, match=rf"\[8, {tiny.HIDDEN}\].*\[8, {2 * tiny.HIDDEN}\]"):
        lexical_weights(head, tiny.HIDDEN, F32, CPU)


def test_a_projection_of_another_width_is_refused(tmp_path: Path) -> None:
    tiny.write_own_heads(tmp_path, dim=12)
    with pytest.raises(WeightMismatch, match=r"multivector\.weight"):
        multivector_weights(MultivectorHead(tmp_path / "hybridtei_heads.safetensors", 13, own=True), tiny.HIDDEN, F32, CPU)


def module(folder: Path, *, wide: int = 4, narrow: int = 3, bias: bool = True) -> DenseModule:
    return DenseModule(folder, wide, narrow, bias, "torch.nn.modules.activation.Tanh")


def test_a_dense_layer_without_weights_is_a_missing_artifact(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match=r"model\.safetensors"):
        dense_layer(module(tmp_path), CPU)


@pytest.mark.parametrize("shape", [{"wide": 5}, {"narrow": 2}])
def test_a_dense_layer_of_another_shape_is_refused(tmp_path: Path, shape: dict[str, int]) -> None:
    tiny.write_dense(tmp_path, 4, 3)
    with pytest.raises(WeightMismatch, match=str(tmp_path)):
        dense_layer(module(tmp_path, **shape), CPU)


def test_a_dense_layer_may_be_a_pickle_of_tensors(tmp_path: Path) -> None:
    weights = {"linear.weight": torch.ones(3, 4), "linear.bias": torch.zeros(3)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    layer = dense_layer(module(tmp_path), CPU)
    assert torch.equal(layer.weight, weights["linear.weight"])
    assert layer.bias is not None


def test_a_dense_layer_without_bias_leaves_it_out(tmp_path: Path) -> None:
    tiny.write_dense(tmp_path, 4, 3)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["bias"] is True
    assert dense_layer(module(tmp_path, bias=False), CPU).bias is None
