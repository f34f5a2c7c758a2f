"""`conformance/families/shapes`: what it writes has the names and shapes that makers write, and what it measures is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from conformance.families.shapes.__main__ import is_unit, measure
from conformance.families.shapes.checkpoint import Checkpoint, read_checkpoints, write_checkpoint
from conformance.families.shapes.serving import ABSENT
from conformance.families.shapes.tensors import SCALE, write_safetensors, write_torch_zip
from conformance.families.shapes.words import KINDS
from hybridtei.checkpoint.weights import Weights

CHECKPOINTS = read_checkpoints()
OWN_CODE = {"new", "nomic_bert"}  # layouts of makers that transformers does not write
NATIVE = [
    name
    for name, one in CHECKPOINTS.items()
    if one.config["model_type"] not in OWN_CODE and "auto_map" not in one.config and not name.startswith("Qwen3-Embedding")
]


@pytest.mark.parametrize("name", NATIVE)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    config = {**checkpoint.config, "architectures": None}
    settings = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model: Any = _class(checkpoint)(settings)
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert checkpoint.shapes == expected


def _class(checkpoint: Checkpoint) -> Any:
    name = checkpoint.config["architectures"][0]
    return getattr(transformers, name.replace("ForMaskedLM", "Model"))


SHAPES = {"a.weight": (3, 5), "norm.weight": (4,), "norm.bias": (4,)}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_both_files_hold_the_same_for_torch(tmp_path: Path, dtype: str) -> None:
    write_torch_zip(tmp_path / "saved.bin", SHAPES, dtype)
    write_safetensors(tmp_path / "model.safetensors", SHAPES, dtype)
    saved = torch.load(tmp_path / "saved.bin", weights_only=True)
    safe = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == SHAPES
    assert all(torch.equal(saved[name], safe[name]) for name in SHAPES)
    assert abs(safe["norm.weight"].float().mean().item() - 1) < 5 * SCALE
    assert 0 < safe["a.weight"].float().std().item() < 5 * SCALE


def test_blocks_repeat_in_tensors_that_are_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.families.shapes import tensors

    tensors._block.cache_clear()
    monkeypatch.setattr(tensors, "BLOCK", 7)
    write_safetensors(tmp_path / "model.safetensors", {"a": (4, 5), "c": (4, 5)}, "F32")
    tensors._block.cache_clear()
    weights = Weights.open(tmp_path)
    values = weights.float32("a").ravel()
    np.testing.assert_array_equal(values[7:14], values[:7])
    assert len(np.unique(values)) == 7
    assert not np.array_equal(values, weights.float32("c").ravel())


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_have_the_size_and_know_letters(kind: str) -> None:
    tokenizer = KINDS[kind](2000)
    assert tokenizer.get_vocab_size() == 2000
    found = tokenizer.encode("a wing in a slipstream")
    assert "[UNK]" not in found.tokens
    assert "<unk>" not in found.tokens


def test_a_process_without_torch() -> None:
    code = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('torch', 'onnx', 'numpy')]); import torch"
    environment = {**os.environ, "PYTHONPATH": str(ABSENT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "[False, False, True]\n"
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 500}


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_a_row_of_the_table(
    tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.families.shapes.__main__.REST_SECONDS", 0.0)
    source = CHECKPOINTS["bge-m3"]
    checkpoint = msgspec.structs.replace(source, config={**source.config, **TINY, "max_position_embeddings": 130})
    write_checkpoint(tmp_path / "tiny", checkpoint)
    faults = measure(tmp_path / "tiny", checkpoint, backend, "float32")
    row = capsys.readouterr().out
    assert row.startswith("tiny")
    if backend == "ort":
        assert not [fault for fault in faults if "beyond" not in fault]
    else:
        assert "needs torch" in faults[0]


def test_what_is_no_answer() -> None:
    assert is_unit([0.6, 0.8], 2)
    assert not is_unit([0.6, 0.8], 3)
    assert not is_unit([0.6, 0.9], 2)
    assert not is_unit([0.6, float("nan")], 2)
