"""Layers of heads as arrays: the right tensor in the right place, each of the declared shape."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conformance.small import tiny
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.heads import HEADS_FILE, MultivectorHead, SparseHead, find_heads
from hybridtei.models.checkpoint.layers import (
    ACTIVATIONS,
    activation_name,
    dense_layer,
    lexical_layers,
    multivector_layer,
)
from hybridtei.models.checkpoint.modules import DenseModule
from tests.near import same
from tests.sampled import paired

OWN = SparseHead("mlp", None, ("hidden", "embedding"), "gelu", own=True)


def holds(
    layer,
    weight,
    bias,
    activation="identity",
):
    same(layer.weight, weight.float().numpy())
    assert (layer.bias is None) == (bias is None)
    if bias is not None:
        same(layer.bias, bias.float().numpy())
    assert layer.activation == activation


# --- activations


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *((name, name) for name in ACTIVATIONS),
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.modules.linear.Identity", "identity"),
        ("GELU", "gelu"),
        ("transformers.activations.GELUActivation", "gelu"),
        ("transformers.activations.NewGELUActivation", "gelu_pytorch_tanh"),
    ],
)
def test_an_activation_is_found_by_its_last_word(name, plain):
    assert activation_name(name, "file") == plain


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.Softsign",
        "os.tanh",
        "xtorch.nn.Tanh",
        "tanh.",
        "",
    ],
)
def test_other_activations_are_refused_with_the_file(name):
    with pytest.raises(UnsupportedArchitecture, match=r"here/config\.json"):
        activation_name(name, Path("here/config.json"))


# --- Dense modules


def dense(folder, **changes):
    return replace(DenseModule(folder, 4, 3, True, "tanh"), **changes)


@pytest.mark.parametrize("suffix", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_in_either_format(tmp_path, suffix, bias):
    tensors = {"linear.weight": torch.randn(3, 4), "linear.bias": torch.randn(3)}
    file = tmp_path / suffix
    save_file(tensors, file) if file.suffix == ".safetensors" else torch.save(tensors, file)
    layer = dense_layer(dense(tmp_path, bias=bias, activation="torch.nn.modules.activation.Tanh"))
    holds(layer, tensors["linear.weight"], tensors["linear.bias"] if bias else None, "tanh")


def test_safetensors_go_before_a_pickle(tmp_path):
    tiny.write_dense(tmp_path, 4, 3)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    assert dense_layer(dense(tmp_path)).weight.shape == (3, 4)


def test_a_dense_layer_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(MissingArtifact, match=r"model\.safetensors"):
        dense_layer(dense(tmp_path))
    tiny.write_dense(tmp_path, 4, 3)
    with pytest.raises(WeightMismatch, match=rf"{tmp_path}.*\[3, 4\].*\[3, 5\]"):
        dense_layer(dense(tmp_path, in_features=5))
    with pytest.raises(UnsupportedArchitecture, match=rf"{tmp_path}/config\.json.*Softsign"):
        dense_layer(dense(tmp_path, activation="torch.nn.Softsign"))


def test_a_bias_that_is_declared_must_be_there(tmp_path):
    save_file({"linear.weight": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    assert dense_layer(dense(tmp_path, bias=False)).bias is None
    with pytest.raises(LoadError, match=r"`linear\.bias`.*linear\.weight"):
        dense_layer(dense(tmp_path))


# --- heads


@pytest.mark.parametrize(
    ("stored", "suffix"),
    paired([torch.float16, torch.bfloat16, torch.float32, torch.float64], [".pt", ".safetensors"]),
)
def test_m3s_files_hold_one_layer_each(tmp_path, suffix, stored):
    for seed, (name, width) in enumerate((("sparse_linear", 1), ("colbert_linear", 24))):
        tiny.write_linear(tmp_path / f"{name}{suffix}", width, dtype=stored, seed=seed)
    sparse, many = find_heads(tmp_path, tiny.HIDDEN)
    assert (sparse.kind, sparse.file) == ("linear", tmp_path / f"sparse_linear{suffix}")
    assert (many.width, many.drop) == (24, "first")
    (out,) = lexical_layers(sparse, tiny.HIDDEN)
    assert out.activation == "identity"
    for layer, width in ((out, 1), (multivector_layer(many, tiny.HIDDEN), 24)):
        assert (layer.weight.shape, layer.bias.shape) == ((width, tiny.HIDDEN), (width,))
        assert layer.weight.dtype == layer.bias.dtype == np.float32


def test_our_perceptron_is_two_layers_in_order(tmp_path):
    written = tiny.write_own_heads(tmp_path)
    sparse, many = find_heads(tmp_path, tiny.HIDDEN)
    assert (sparse.kind, sparse.inputs, sparse.activation, sparse.idf) == (
        "mlp",
        ("hidden", "embedding"),
        "gelu",
        True,
    )
    assert (many.width, many.drop) == (12, "specials")
    hidden, out = lexical_layers(sparse, tiny.HIDDEN)
    holds(hidden, written["sparse.hidden.weight"], written["sparse.hidden.bias"], "gelu")
    holds(out, written["sparse.out.weight"], written["sparse.out.bias"])
    holds(multivector_layer(many, tiny.HIDDEN), written["multivector.weight"], None)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sparse.hidden.weight": (8, tiny.HIDDEN)}, "sparse.hidden.weight"),
        # The width is read off the bias
        ({"sparse.hidden.bias": (7,)}, "sparse.hidden.weight"),
        ({"sparse.hidden.bias": (8, 1)}, "sparse.hidden.bias"),
        ({"sparse.out.weight": (2, 8)}, "sparse.out.weight"),
        ({"sparse.out.bias": ()}, "sparse.out.bias"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_its_file(tmp_path, changes, name):
    tensors = tiny.write_own_heads(tmp_path) | {
        key: torch.ones(shape) for key, shape in changes.items()
    }
    file = tmp_path / HEADS_FILE
    save_file(tensors, file)
    with pytest.raises(WeightMismatch, match=f"{file}: `{name}`"):
        lexical_layers(replace(OWN, file=file), tiny.HIDDEN)


@pytest.mark.parametrize(
    "lost", ["sparse.hidden.weight", "sparse.hidden.bias", "sparse.out.weight", "sparse.out.bias"]
)
def test_a_tensor_missing_from_our_file_is_named(tmp_path, lost):
    tensors, file = tiny.write_own_heads(tmp_path), tmp_path / HEADS_FILE
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file)
    with pytest.raises(LoadError, match=rf"{file}.*{lost}"):
        lexical_layers(replace(OWN, file=file), tiny.HIDDEN)


def test_a_projection_of_another_width_is_refused(tmp_path):
    tiny.write_own_heads(tmp_path, dim=12)
    with pytest.raises(WeightMismatch, match=r"multivector\.weight"):
        multivector_layer(MultivectorHead(tmp_path / HEADS_FILE, 13, own=True), tiny.HIDDEN)


def test_our_own_file_may_have_the_name_of_m3s(tmp_path):
    written = tiny.write_own_heads(tmp_path)
    for stem, place in (("sparse_linear", 0), ("colbert_linear", 1)):
        file = next(tmp_path.glob("*.safetensors")).rename(tmp_path / f"{stem}.safetensors")
        found = find_heads(tmp_path / "elsewhere", tiny.HIDDEN, file)[place]
        if isinstance(found, SparseHead):
            holds(
                lexical_layers(found, tiny.HIDDEN)[1],
                written["sparse.out.weight"],
                written["sparse.out.bias"],
            )
        else:
            holds(multivector_layer(found, tiny.HIDDEN), written["multivector.weight"], None)


def test_an_activation_of_our_file_that_nobody_knows_is_refused(tmp_path):
    tiny.write_own_heads(tmp_path)
    head = replace(OWN, file=tmp_path / HEADS_FILE, activation="softsign")
    with pytest.raises(UnsupportedArchitecture, match=f"{HEADS_FILE}.*softsign"):
        lexical_layers(head, tiny.HIDDEN)
