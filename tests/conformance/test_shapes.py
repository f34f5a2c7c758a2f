"""`conformance/families/shapes`: what it writes can be served, and what it measures is there."""

import os
import sys

import msgspec
import pytest

from conformance.families.shapes.__main__ import measure
from conformance.families.shapes.checkpoint import read_checkpoints, write_checkpoint
from conformance.families.shapes.serving import ABSENT
from tests.ran import ran

CHECKPOINTS = read_checkpoints()


def test_a_process_without_torch():
    code = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('torch', 'onnx', 'numpy')]); import torch"
    environment = {**os.environ, "PYTHONPATH": str(ABSENT)}
    done = ran([sys.executable, "-c", code], env=environment)
    assert done.stdout == "[False, False, True]\n"
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 500,
}


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_a_row_of_the_table(tmp_path, backend, capsys, monkeypatch):
    monkeypatch.setattr("conformance.families.shapes.__main__.REST_SECONDS", 0.0)
    source = CHECKPOINTS["bge-m3"]
    checkpoint = msgspec.structs.replace(
        source, config={**source.config, **TINY, "max_position_embeddings": 130}
    )
    write_checkpoint(tmp_path / "tiny", checkpoint)
    faults = measure(tmp_path / "tiny", checkpoint, backend, "float32", "first")
    row = capsys.readouterr().out
    assert row.startswith("tiny")
    if backend == "ort":
        assert not [fault for fault in faults if "beyond" not in fault]
    else:
        assert "needs torch" in faults[0]
