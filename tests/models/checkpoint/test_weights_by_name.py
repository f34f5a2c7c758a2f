"""Tensors by name, without torch: prefixes, shards, half precision, and files that are not what
they should be."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conformance.small import tiny
from hybridtei.errors import LoadError, MissingArtifact
from hybridtei.models.checkpoint.weights import Weights, has_weights, weight_files
from tests.models.refused import refuses_weights
from tests.near import same

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def write(folder, *names, file="model.safetensors", shape=(2, 3)):
    """A file of tensors, each filled with its own number."""
    save_file(
        {name: torch.full(shape, float(number)) for number, name in enumerate(names)}, folder / file
    )
    return folder


def shards(folder):
    write(folder, "a.weight", file=SHARDS[0])
    write(folder, "x", "b.weight", file=SHARDS[1])
    placed = {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}
    tiny.write_json(folder / INDEX, {"metadata": {"total_size": 72}, "weight_map": placed})
    return folder


# --- names


@pytest.mark.parametrize(
    ("held", "asked", "found"),
    [
        (["encoder.weight"], "encoder.weight", "encoder.weight"),
        (["bert.encoder.weight"], "encoder.weight", "bert.encoder.weight"),
        (["model.bert.encoder.weight"], "encoder.weight", "model.bert.encoder.weight"),
        (["encoder.weight"], "bert.encoder.weight", "encoder.weight"),
        (["encoder.weight", "bert.encoder.weight"], "encoder.weight", "encoder.weight"),
        (["a.b.encoder.weight", "bert.encoder.weight"], "encoder.weight", "a.b.encoder.weight"),
        (["model.norm.weight", "model.layers.0.norm.weight"], "norm.weight", "model.norm.weight"),
        (["weight", "encoder.weight"], "bert.encoder.weight", "encoder.weight"),
        (["myencoder.weight"], "encoder.weight", None),
        (["encoder.weight"], "myencoder.weight", None),
        (["encoder.weight"], "encoder.bias", None),
        (["encoder.weight.scale"], "encoder.weight", None),
    ],
)
def test_a_name_is_found_with_and_without_a_prefix(tmp_path, held, asked, found):
    assert Weights.open(write(tmp_path, *held)).find(asked) == found


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_widened_to_single_precision(tmp_path, stored):
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(stored)
    save_file({"a": values}, tmp_path / "model.safetensors")
    found = Weights.open(tmp_path).float32("a")
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    same(found, values.float().numpy())


# --- views of the file


def test_single_precision_is_a_view_of_the_file_that_nobody_can_write(tmp_path):
    found = Weights.open(write(tmp_path, "a")).float32("a")
    assert not found.flags.owndata
    assert not found.flags.writeable
    assert found.flags.aligned


def test_what_was_given_back_is_read_again(tmp_path):
    values = torch.randn(300, 700, generator=torch.Generator().manual_seed(0))
    save_file({"a": values, "half": values.half()}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    before, half = weights.float32("a"), weights.float32("half")
    for _ in range(2):
        weights.release()
        same(before, values.numpy())
        same(half, values.half().float().numpy())
        same(weights.float32("a"), values.numpy())


def test_arrays_outlive_the_weights_and_the_file(tmp_path):
    found = Weights.open(write(tmp_path, "a", "b")).float32("b")
    (tmp_path / "model.safetensors").unlink()
    same(found, np.full((2, 3), 1, dtype=np.float32))


def raw(folder, header, content):
    """A file with just this header, of whatever length."""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    return folder


@pytest.mark.parametrize("padding", range(4))
def test_a_header_of_any_length_will_do(tmp_path, padding):
    values = np.arange(6, dtype=np.float32)
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = {"__metadata__": {"pad": "x" * padding}, "a": entry}
    found = Weights.open(raw(tmp_path, header, values.tobytes())).float32("a")
    assert found.flags.aligned
    same(found, values.reshape(2, 3))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_a_number_and_a_tensor_of_nothing_have_their_shape(tmp_path, shape):
    save_file({"a": torch.zeros(shape), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Weights.open(tmp_path).float32("a").shape == shape
    save_file({"a": torch.zeros(shape)}, tmp_path / "model.safetensors")
    assert Weights.open(tmp_path).float32("a").shape == shape


@pytest.mark.parametrize("dtype", ["I64", "I8", "F8_E4M3", "BOOL"])
def test_a_tensor_that_is_no_number_of_ours_is_named_with_its_file(tmp_path, dtype):
    size = 8 if dtype == "I64" else 1
    header = {"ids": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * size]}}
    weights = Weights.open(raw(tmp_path, header, bytes(4 * size)))
    assert weights.shape("ids") == (4,)
    with pytest.raises(LoadError, match=rf"{tmp_path}/model\.safetensors: `ids` is {dtype}"):
        weights.float32("ids")


# --- files


def test_shards_are_one_checkpoint(tmp_path):
    weights = Weights.open(shards(tmp_path))
    assert weights.shape("b.weight") == (2, 3)
    assert weights.find("c.weight") is None
    assert [weights.float32(name)[0, 0] for name in ("a.weight", "b.weight")] == [0, 1]


def test_a_whole_file_goes_before_an_index(tmp_path):
    assert Weights.open(write(shards(tmp_path), "c.weight")).find("a.weight") is None


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_missing_is_named(tmp_path, name):
    (shards(tmp_path) / name).unlink()
    refuses_weights(tmp_path, f"{tmp_path}/{name}", MissingArtifact)


def test_shards_without_their_index_are_read_by_their_numbers(tmp_path):
    (shards(tmp_path) / INDEX).unlink()
    weights = Weights.open(tmp_path)
    assert [weights.float32(name)[0, 0] for name in ("a.weight", "b.weight")] == [0, 1]
    (tmp_path / SHARDS[0]).unlink()
    refuses_weights(tmp_path, f"{tmp_path}/{SHARDS[0]}", MissingArtifact)


def test_a_name_does_not_count_more_shards_than_any_model_has(tmp_path):
    write(tmp_path, "a", file="model-00001-of-99999.safetensors")
    refuses_weights(tmp_path, "one of 99999 shards, allowed are 1000")


def test_weights_that_are_missing_are_named(tmp_path):
    refuses_weights(tmp_path, rf"{tmp_path}/model\.safetensors", MissingArtifact)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 25]}},
        {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 24]}},
        [],
    ],
)
def test_a_header_that_lies_is_named_with_its_file(tmp_path, entries):
    """The library finds it out."""
    refuses_weights(
        raw(tmp_path, entries, bytes(24)),
        rf"{tmp_path}/model\.safetensors: cannot be read as weights",
    )


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        *({"weight_map": kind} for kind in (None, ["model.safetensors"], {"a": 3})),
    ],
)
def test_an_index_without_a_map_to_files_is_named(tmp_path, index):
    tiny.write_json(tmp_path / INDEX, index)
    refuses_weights(tmp_path, str(tmp_path))


@pytest.mark.parametrize(
    "escape", ["../outside.safetensors", "deep/../../outside.safetensors", "absolute"]
)
def test_an_index_may_not_lead_out_of_the_folder(tmp_path, escape):
    write(tmp_path, "a", file="outside.safetensors")
    folder = tmp_path / "model"
    place = str(tmp_path / "outside.safetensors") if escape == "absolute" else escape
    tiny.write_json(folder / INDEX, {"weight_map": {"a": place}})
    refuses_weights(folder, f"{folder}.*leads out")


@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_may_name_shards_of_any_name(tmp_path, index):
    folder = shards(tmp_path)
    text = (folder / INDEX).read_text()
    (folder / INDEX).unlink()
    for old, new in zip(SHARDS, ("first.safetensors", "second.safetensors"), strict=True):
        (folder / old).rename(folder / new)
        text = text.replace(old, new)
    (folder / index).write_text(text)
    assert has_weights(folder)
    assert [file.stem for file in weight_files(folder)] == ["first", "second"]
    assert Weights.open(folder).float32("b.weight")[0, 0] == 1


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "net.student."])
@pytest.mark.parametrize(
    "names", [("bert.a.weight", "classifier.weight"), ("model.a.weight", "score.weight")]
)
def test_a_trainers_prefix_before_trunk_and_head_is_removed(tmp_path, names, prefix):
    write(tmp_path, *(prefix + name for name in names))
    assert Weights.open(tmp_path).names() == {*names}


@pytest.mark.parametrize("names", [("model.a.weight", "model.norm.weight"), ("bert.a.weight",)])
def test_a_trunks_own_prefix_stays(tmp_path, names):
    write(tmp_path, *names)
    assert Weights.open(tmp_path).names() == {*names}
