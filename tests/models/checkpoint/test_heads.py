"""Heads that lie beside a model: found by name, each by itself, and never made up."""

import json

import pytest
import torch
from safetensors.torch import save_file

from conformance.small import tiny
from hybridtei.batch import Head
from hybridtei.errors import LoadError, MissingArtifact, WeightMismatch
from hybridtei.models.checkpoint.heads import (
    HEADS_FILE,
    find_heads,
    read_description,
)
from hybridtei.models.checkpoint.spec import read_spec

LINEAR = ["sparse_linear", "colbert_linear"]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    "suffixes", [(".bin",), (".npz",), (".pt", ".safetensors"), (".pt", ".bin")]
)
def test_a_head_that_would_not_count_is_named(tmp_path, name, suffixes):
    for suffix in suffixes:
        tiny.write_linear(tmp_path / f"{name}{suffix}", 1)
    with pytest.raises(LoadError, match=f"{name}\\.pt or {name}\\.safetensors") as caught:
        find_heads(tmp_path, tiny.HIDDEN)
    assert all(str(tmp_path / f"{name}{suffix}") in str(caught.value) for suffix in suffixes)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (tiny.HIDDEN,),
        (0, tiny.HIDDEN),
        (1, 1, tiny.HIDDEN),
        (1, tiny.HIDDEN + 1),
    ],
)
def test_a_head_that_is_no_matrix_of_the_width_is_an_error(tmp_path, name, shape):
    torch.save({"weight": torch.ones(shape), "bias": torch.ones(1)}, tmp_path / f"{name}.pt")
    with pytest.raises(WeightMismatch, match=rf"{name}\.pt.*\b{tiny.HIDDEN}\]"):
        find_heads(tmp_path, tiny.HIDDEN)


@pytest.mark.parametrize(
    ("lost", "left"), [("sparse_linear.pt", Head.MULTIVECTOR), ("colbert_linear.pt", Head.SPARSE)]
)
def test_each_head_stands_alone(m3, copied, lost, left):
    folder = copied(m3)
    (folder / lost).unlink()
    assert read_spec(folder).heads == {Head.DENSE, Head.TOKENS, left}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.ones(1, tiny.HIDDEN)},
        {"weight": torch.ones(1, tiny.HIDDEN), "bias": torch.ones(1), "scale": torch.ones(1)},
        {"linear.weight": torch.ones(1, tiny.HIDDEN), "linear.bias": torch.ones(1)},
        {},
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_head_that_is_half_there_is_an_error(tmp_path, name, tensors, suffix):
    path = tmp_path / f"{name}{suffix}"
    torch.save(tensors, path) if suffix == ".pt" else save_file(tensors, path)
    with pytest.raises(LoadError) as caught:
        find_heads(tmp_path, tiny.HIDDEN)
    assert str(path) in str(caught.value)
    assert all(key in str(caught.value) for key in (*tensors, "weight", "bias"))


@pytest.mark.parametrize("name", ["sparse_linear.pt", "sparse_linear.safetensors"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", MissingArtifact),
        (b"version https://git-lfs.github.com/spec/v1\noid x", MissingArtifact),
        (b"\x00" * 60, LoadError),
    ],
)
def test_a_head_file_that_is_none_is_named(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=name) as caught:
        find_heads(tmp_path, tiny.HIDDEN)
    assert type(caught.value) is kind


# --- our own file


@pytest.mark.parametrize("head", ["sparse", "multivector"])
def test_our_file_may_hold_one_head_only(tmp_path, head):
    tiny.write_own_heads(tmp_path, **{head: None})
    found = dict(zip(("sparse", "multivector"), find_heads(tmp_path, tiny.HIDDEN), strict=True))
    assert found.pop(head) is None
    assert None not in found.values()


def test_our_file_goes_before_m3s(m3, copied):
    folder = copied(m3)
    tiny.write_own_heads(folder)
    sparse, _ = find_heads(folder, tiny.HIDDEN)
    assert sparse.kind == "mlp"


def test_a_file_kept_elsewhere_must_be_there(tmp_path):
    tiny.write_own_heads(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / HEADS_FILE).rename(tmp_path / "elsewhere" / "x.safetensors")
    assert find_heads(tmp_path, tiny.HIDDEN) == (None, None)
    assert None not in find_heads(tmp_path, tiny.HIDDEN, tmp_path / "elsewhere" / "x.safetensors")
    with pytest.raises(MissingArtifact, match=r"y\.safetensors"):
        find_heads(tmp_path, tiny.HIDDEN, tmp_path / "elsewhere" / "y.safetensors")


def test_heads_made_for_another_model_are_refused(tmp_path):
    tiny.write_own_heads(tmp_path)
    with pytest.raises(WeightMismatch, match=rf"{HEADS_FILE}.*{tiny.HIDDEN}.*{2 * tiny.HIDDEN}"):
        find_heads(tmp_path, 2 * tiny.HIDDEN)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"hybridtei_heads": "not json"},
        {"hybridtei_heads": "{}"},
        {"hybridtei_heads": '"text"'},
        {"hybridtei_heads": json.dumps({"version": 2})},
    ],
)
def test_a_file_that_describes_itself_otherwise_is_refused(tmp_path, metadata):
    save_file({"multivector.weight": torch.ones(2, 2)}, tmp_path / HEADS_FILE, metadata=metadata)
    with pytest.raises(LoadError, match=HEADS_FILE):
        read_description(tmp_path / HEADS_FILE)


@pytest.mark.parametrize(
    "changes",
    [
        {"sparse": {"activation": "gelu"}},
        {"sparse": {"inputs": ["hidden", "position"], "activation": "gelu"}},
        {"sparse": {"inputs": [], "activation": "gelu"}},
        {"multivector": {}},
        {"multivector": {"dim": "wide"}},
        {"multivector": {"dim": 12, "drop": "last"}},
    ],
)
def test_a_description_that_lacks_or_misnames_something_is_refused(tmp_path, changes):
    tiny.write_bert(tmp_path)
    tiny.write_own_heads(tmp_path, **changes)
    with pytest.raises(LoadError, match=HEADS_FILE):
        read_spec(tmp_path)
