"""Folders that no backend serves: each is refused alike by all, before any is tried, with what to
use instead."""

import json
import re

import pytest

from conformance.small import tiny
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture
from hybridtei.models.heads.models import load_trunk

LORA = {"peft_type": "LORA", "base_model_name_or_path": "/elsewhere/base", "r": 8}


def refusal(folder, kind, backend):
    options = {"backend": backend}
    with pytest.raises(LoadError) as caught:
        Encoder.load(folder, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert str(folder) in message
    assert "pip install" not in message
    return message


def test_no_quantisation_is_none(bert, copied):
    folder = tiny.configured(copied(bert), quantization_config=None)
    Encoder.load(folder)


FOREIGN = {
    "model-Q4_K_M.gguf": r"holds weights for llama\.cpp \(GGUF\): model-Q4_K_M\.gguf",
    "tf_model.h5": r"holds TensorFlow's weights: tf_model\.h5.*from_tf=True",
    "bert_model.ckpt.index": r"holds TensorFlow's weights: bert_model\.ckpt\.index",
    "flax_model.msgpack": r"holds Flax's weights: flax_model\.msgpack.*from_flax=True",
    "consolidated.safetensors": r"holds weights under the publisher's own names: consolidated\.safetensors",
    "model.fp16.safetensors": r"holds weights of a variant: model\.fp16\.safetensors.*rename the file to model\.safetensors",
    "openvino/openvino_model.xml": r"holds OpenVINO's graph: openvino/openvino_model\.xml",
    "openvino_model.xml": r"holds OpenVINO's graph: openvino_model\.xml",
    "model.bin": r"holds weights for CTranslate2: model\.bin",
    "model.pt": r"holds a program of TorchScript, .*: model\.pt.*save_pretrained",
    "pytorch_model.pth": r"holds torch's weights .*: pytorch_model\.pth.*save_pretrained",
    "checkpoint-500/model.safetensors": r"checkpoint-500/model\.safetensors.*one of these folders",
    "other.txt": r"model\.safetensors: missing\. hybridtei reads model\.safetensors or its shards",
}


def test_weights_of_other_programs_beside_ours_change_nothing(folder):
    for name in FOREIGN:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    Encoder.load(folder)


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_an_adapter_without_factors_is_refused(folder, backend):
    tiny.write_json(folder / "adapter_config.json", LORA)
    assert "adapter_model.safetensors: missing" in refusal(folder, MissingArtifact, backend)


def test_heads_are_not_trained_on_an_adapters_base(folder):
    tiny.write_json(folder / "adapter_config.json", LORA)
    with pytest.raises(LoadError, match="heads are not trained on a model with an adapter"):
        load_trunk(folder)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, LoadError),
        ({"model_name": "x" * 10_000, "config": {"r": 8}}, UnsupportedArchitecture),
        ({**LORA, "peft_type": 7}, UnsupportedArchitecture),
    ],
)
def test_an_adapter_of_another_kind_is_refused(folder, settings, kind):
    tiny.write_json(folder / "adapter_config.json", settings)
    # A long name is cut
    assert len(refusal(folder, kind, "auto")) < 2000


def test_an_empty_folder_and_one_of_folders_are_told_apart(bert, tmp_path):
    empty, cache = tmp_path / "empty", tmp_path / "models--x"
    empty.mkdir()
    assert "config.json: missing: the folder is empty" in refusal(empty, MissingArtifact, "auto")
    (cache / "snapshots/abc").mkdir(parents=True)
    (cache / "snapshots/abc/config.json").write_text(json.dumps({"model_type": "bert"}))
    assert f"The folder {cache}/snapshots/abc has one" in refusal(cache, MissingArtifact, "auto")


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_weights_for_another_program_says_what_they_are(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(bytes(300))
    assert re.search(FOREIGN[name], refusal(folder, MissingArtifact, "auto"))
