"""A checkpoint is material to judge: whatever its files say, loading ends with an error that names
the file, costs no more memory than the files have bytes, reads nothing outside the folder, and runs
nothing."""

import itertools
import json
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from conformance.small import tiny
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, WeightMismatch
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.models.checkpoint import files, rankers
from hybridtei.models.checkpoint.files import MAX_JSON_BYTES, check_links, read_json
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.hub_layouts import translate
from hybridtei.models.checkpoint.sizes import check_sizes, min_weights
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights, check_finite

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
GIGABYTE = 1 << 30


def load(folder):
    return Encoder.load(folder, backend="torch")


def refused(folder):
    with pytest.raises(LoadError) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def little_memory():
    """Two gigabytes more than there are, at most."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2 * GIGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.usefixtures("little_memory")
def test_a_size_that_the_files_do_not_hold_takes_no_memory(folder, key):
    for value in (10**5, 10**7, 10**9, 10**12, 10**30, 1e300):
        tiny.configured(folder, **{key: value})
        refused(folder)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("deberta-v2", "max_relative_positions"),
        ("deberta-v2", "position_buckets"),
        ("t5", "relative_attention_max_distance"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_a_distance_that_is_none_takes_no_memory(tmp_path, family, key):
    folder = tiny.configured(tiny.write_family(tmp_path, family), **{key: 10**9})
    with pytest.raises(LoadError, match=f"`{key}` is 1000000000"):
        read_spec(folder)


@pytest.mark.parametrize("number", [1, 3])
def test_distances_without_buckets_are_refused(tmp_path, number):
    folder = tiny.configured(
        tiny.write_family(tmp_path, "t5"), relative_attention_num_buckets=number
    )
    with pytest.raises(LoadError, match="relative_attention_num_buckets"):
        Encoder.load(folder, backend="ort", pooling="mean")


WRONG = [0, -1, "x", None, 1.5, True, [], float("nan")]


@pytest.mark.parametrize(
    "key", [*SIZES, "num_attention_heads", "hidden_act", "layer_norm_eps", "pad_token_id", "dtype"]
)
def test_a_value_of_the_wrong_kind_is_refused_or_does_not_matter(folder, key):
    for value in WRONG:
        tiny.configured(folder, **{key: value})
        try:
            encoder = load(folder)
        except LoadError:
            # Of no other kind
            assert str(folder) in refused(folder)
        else:
            dense = encoder.encode(["baka bulo"]).dense
            assert np.isfinite(dense).all()


def test_no_public_kind_of_model_has_fewer_weights_than_it_says(tmp_path):
    for family in sorted(tiny.FAMILIES):
        folder = tiny.write_family(tmp_path / family, family)
        config = translate(json.loads((folder / "config.json").read_text()), folder / "config.json")
        held = sum(array.size for array in load_file(folder / "model.safetensors").values())
        assert 0 < min_weights(config, has_position_table=family == "bert") <= held


def test_weights_that_are_not_there_yet_decide_nothing(tmp_path):
    check_sizes({"vocab_size": 10**6, "hidden_size": 10**5}, tmp_path, has_position_table=True)
    with pytest.raises(LoadError, match="`vocab_size` is 100000000, more than"):
        check_sizes({"vocab_size": 10**8}, tmp_path, has_position_table=True)
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    with pytest.raises(
        WeightMismatch, match="at least 110 weights, but the files of weights hold 100 bytes"
    ):
        check_sizes({"vocab_size": 11, "hidden_size": 10}, tmp_path, has_position_table=False)


def set_last(folder, name, value):
    """The checkpoint, after the last number of a tensor is set."""

    def edit(tensors):
        tensors[name].view(-1)[-1] = value
        return tensors

    return tiny.change(folder, edit)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias"]
)
def test_a_weight_that_is_no_number_is_refused_by_name(bert, copied, value, name):
    # Of a word that no self-test holds
    folder = set_last(copied(bert), name, value)
    size = Weights.open(bert).float32(name).size
    told = f"`{name}` holds NaN or infinity, at 1 of {size} places"
    assert told in refused(folder)
    # Where graphs without weights have them from
    weights = Weights.open(folder)
    with pytest.raises(LoadError, match=told):
        weights.float32(name)
    rows, *columns = weights.shape(name)
    if columns:
        weights.rows(name, [0, 1])
        with pytest.raises(LoadError, match="holds NaN or infinity"):
            weights.rows(name, [rows - 1])


def test_half_precision_that_overflows_is_refused(bert, copied):
    folder = set_last(copied(bert), "embeddings.word_embeddings.weight", 1e6)
    load(folder)
    with pytest.raises(LoadError, match=r"word_embeddings\.weight` holds NaN or infinity"):
        TorchBackend(read_spec(folder), dtype="float16")


def test_numbers_whose_sum_is_none_are_numbers(tmp_path):
    check_finite(np.full((4, 4), 3e38, dtype=np.float32), tmp_path, "large")
    with pytest.raises(LoadError, match="`x` holds NaN or infinity, at 1 of 16 places"):
        check_finite(np.array([3e38] * 15 + [np.inf], dtype=np.float32), tmp_path, "x")


class Runs:
    """A pickle of it is a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "colbert_linear.pt"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_that_does_something_is_refused_and_not_done(m3, copied, tmp_path, name, plain):
    folder, done = copied(m3), tmp_path / "done"
    for path in (*folder.glob("model*.safetensors"), *folder.glob("colbert_linear*")):
        if name == "pytorch_model.bin" or path.name.startswith("colbert"):
            path.unlink()
    held = {"weight": Runs(done)}
    if plain:
        (folder / name).write_bytes(pickle.dumps(held))
    else:
        torch.save(held, folder / name)
    refused(folder)
    assert not done.exists()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "1_Pooling", "model.safetensors", "other"]
)
def test_a_link_that_leads_out_is_refused_by_name(hybrid, copied, tmp_path, name):
    folder = copied(hybrid)
    outside = tmp_path / "outside"
    path = folder / name
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    path.symlink_to(outside)
    assert f"{name}: a link that leads out of the model's folder, to {outside}" in refused(folder)


def test_links_within_and_those_of_the_hubs_cache_are_fine(tmp_path):
    snapshot = tmp_path / "models--a" / "snapshots" / "abc"
    blobs = tmp_path / "models--a" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "models--b" / "blobs"):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "inner").symlink_to("config.json")
    (snapshot / "loop").symlink_to(".")
    check_links(snapshot)
    linked = tmp_path / "chosen"
    linked.symlink_to(snapshot)
    # Whoever runs the server chose this one
    check_links(linked)
    (snapshot / "other").symlink_to("../../../models--b/blobs/1")
    with pytest.raises(LoadError, match="other: a link that leads out"):
        check_links(snapshot)


def test_a_folder_of_too_many_files_is_none_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILES", 20)
    for number in range(20):
        (tmp_path / str(number)).touch()
    check_links(tmp_path)
    for number in range(20, 22):
        (tmp_path / str(number)).touch()
    with pytest.raises(LoadError, match="not the folder of a model"):
        check_links(tmp_path)


SETTINGS_FILES = ("config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json")
CONTENTS = (
    POINTER,
    "[" * 100_000,
    "{" * 10,
    '{"a": NaN',
    "\x00",
    "",
    '"text"',
    "null",
    "[]",
    "1",
)
# A list without modules is read as a folder without that file.
VALID = ("modules.json", "[]")


@pytest.mark.parametrize(
    ("name", "content"),
    [pair for pair in itertools.product(SETTINGS_FILES, CONTENTS) if pair != VALID],
)
def test_a_settings_file_of_any_other_content_is_refused_by_name(hybrid, copied, name, content):
    folder = copied(hybrid)
    (folder / name).write_text(content)
    said = refused(folder)
    assert name.partition("/")[0] in said
    if content == POINTER:
        assert "git lfs pull" in said


def test_a_settings_file_without_end_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        # Of holes: it takes no disk
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(LoadError, match=r"tokenizer\.json: larger than"):
        read_json(path)


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "hybridtei_rerank.json"])
def test_a_file_that_is_a_device_without_an_end_is_refused(tmp_path, monkeypatch, name):
    for module in (files, rankers):
        monkeypatch.setattr(module, "MAX_JSON_BYTES", 1_000_000)
    (tmp_path / name).symlink_to("/dev/zero")
    read = {
        "config.json": lambda: read_json(tmp_path / name),
        "chat_template.jinja": lambda: rankers._of_chat(
            Folder(tmp_path), flat=True, instruction=None
        ),
        "hybridtei_rerank.json": lambda: rankers._own(tmp_path / name),
    }
    with pytest.raises(LoadError, match=f"{name}: larger than 1000000 bytes"):
        read[name]()


def test_code_that_comes_with_a_model_is_not_run(folder, tmp_path):
    left_behind = tmp_path / "left-behind"
    (folder / "configuration_gizmo.py").write_text(f"open({str(left_behind)!r}, 'w')")
    tiny.configured(
        folder,
        model_type="gizmo",
        auto_map={"AutoConfig": "configuration_gizmo.GizmoConfig"},
    )
    told = refused(folder)
    assert "`auto_map` names `configuration_gizmo.GizmoConfig`" in told
    assert "--trust-remote-code" in told
    assert not left_behind.exists()
