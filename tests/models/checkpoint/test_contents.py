"""Folders that no backend serves: each is refused alike by all, before any is tried, with what to use instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture
from hybridtei.models.heads.models import load_trunk
from tests import tiny
from tests.sampled import paired

Copied = Callable[[Path], Path]
BACKENDS = ["ort", "openvino", "torch", "auto"]
LORA = {"peft_type": "LORA", "base_model_name_or_path": "/elsewhere/base", "r": 8}
METHODS = ["gptq", "awq", "bitsandbytes", "fp8", "torchao", "hqq", "compressed-tensors"]


def refusal(folder: Path, kind: type[LoadError], backend: str) -> str:
    options: dict[str, Any] = {"backend": backend}
    with pytest.raises(LoadError) as caught:
        Encoder.load(folder, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert str(folder) in message
    assert "pip install" not in message
    return message


@pytest.mark.parametrize(("method", "backend"), paired(METHODS, BACKENDS))
def test_quantised_weights_are_refused_by_their_method(
    bert: Path, copied: Copied, method: str, backend: str
) -> None:
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    message = refusal(folder, LoadError, backend)
    assert f"config.json: the weights are quantised (`quantization_config`, '{method}')" in message
    assert "Give the model that it was made from; `--dtype int8` quantises here" in message
    tiny.edit_json(
        folder / "config.json", quantization_config=..., compression_config={"load_in_8bit": True}
    )
    assert "of an unnamed method" in refusal(folder, LoadError, backend)


def test_no_quantisation_is_none(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", quantization_config=None)
    Encoder.load(folder)


FOREIGN: Mapping[str, str] = {
    "model-Q4_K_M.gguf": r"holds weights for llama\.cpp \(GGUF\): model-Q4_K_M\.gguf",
    "tf_model.h5": r"holds TensorFlow's weights: tf_model\.h5.*from_tf=True",
    "bert_model.ckpt.index": r"holds TensorFlow's weights: bert_model\.ckpt\.index",
    "flax_model.msgpack": r"holds Flax's weights: flax_model\.msgpack.*from_flax=True",
    "consolidated.safetensors": r"holds weights under the publisher's own names: consolidated\.safetensors",
    "model.fp16.safetensors": r"holds weights of a variant: model\.fp16\.safetensors.*rename the file to model\.safetensors",
    "other.txt": r"model\.safetensors: missing\. hybridtei reads model\.safetensors or its shards",
}


@pytest.mark.parametrize(("name", "backend"), paired([*FOREIGN], BACKENDS))
def test_weights_of_other_programs_are_named(
    bert: Path, copied: Copied, name: str, backend: str
) -> None:
    folder = copied(bert)
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder, MissingArtifact, backend)
    assert re.search(FOREIGN[name], message)


def test_weights_of_other_programs_beside_ours_change_nothing(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    for name in FOREIGN:
        (folder / name).write_bytes(b"")
    Encoder.load(folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_without_factors_is_refused(bert: Path, copied: Copied, backend: str) -> None:
    folder = copied(bert)
    tiny.write_json(folder / "adapter_config.json", LORA)
    assert "adapter_model.safetensors: missing" in refusal(folder, MissingArtifact, backend)


def test_heads_are_not_trained_on_an_adapters_base(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
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
def test_an_adapter_of_another_kind_is_refused(
    bert: Path, copied: Copied, settings: dict[str, Any], kind: type[LoadError]
) -> None:
    folder = copied(bert)
    tiny.write_json(folder / "adapter_config.json", settings)
    # A long name is cut
    assert len(refusal(folder, kind, "auto")) < 2000


def test_an_empty_folder_and_one_of_folders_are_told_apart(bert: Path, tmp_path: Path) -> None:
    empty, cache = tmp_path / "empty", tmp_path / "models--x"
    empty.mkdir()
    assert "config.json: missing: the folder is empty" in refusal(empty, MissingArtifact, "auto")
    (cache / "snapshots/abc").mkdir(parents=True)
    (cache / "snapshots/abc/config.json").write_text(json.dumps({"model_type": "bert"}))
    assert f"The folder {cache}/snapshots/abc has one" in refusal(cache, MissingArtifact, "auto")
