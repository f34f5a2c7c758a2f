"""Exported folders: read by our own loader and by plain ONNX Runtime, and the same as what they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime as ort
import pytest

from hybridtei import cli
from hybridtei.backends.fidelity import Guard
from hybridtei.backends.graph import export_model as module
from hybridtei.backends.graph.export_model import export_model
from hybridtei.backends.graph.onnx_backend import OnnxBackend
from hybridtei.backends.graph.onnx_files import find_own_graph
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.checkpoint.spec import read_spec
from hybridtei.config import ModelConfig
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.load import find_model
from tests import tiny
from tests.backends.graph.test_int8 import LOOSE
from tests.backends.graph.test_onnx_backend import random_encodings, run, same


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def exported(folder: Path, out: Path, dtype: Literal["float32", "int8"] = "float32", pooling: str | None = None) -> OnnxBackend:
    report = export_model(find_model(ModelConfig(model_id=str(folder), pooling=pooling)), out, dtype, LOOSE)
    assert str(report.path) in str(report)
    assert (report.fidelity is None) == (dtype == "float32")
    spec = read_spec(out, pooling=pooling)
    path = find_own_graph(spec, dtype)
    assert path == report.path
    assert not list(out.glob("*.safetensors")) or spec.sparse is not None
    return OnnxBackend.from_file(spec, path, dtype=dtype)


@pytest.mark.parametrize("name", ["bert", "hybrid", pytest.param("m3", marks=pytest.mark.slow)])
def test_a_folder_gives_what_its_checkpoint_gives(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    folder: Path = request.getfixturevalue(name)
    backend, theirs = exported(folder, tmp_path / "out"), TorchBackend(read_spec(folder))
    assert backend.spec.heads == theirs.spec.heads
    texts = random_encodings(theirs.spec)
    same(run(backend, texts), run(theirs, texts), len(texts))


def test_dense_modules_come_along(tmp_path: Path) -> None:
    dense = [(tiny.HIDDEN, 8, "torch.nn.modules.activation.Tanh")]
    folder = tiny.write_modules(tiny.write_family(tmp_path / "model", "bert"), dense=dense, normalize=True)
    texts = random_encodings(read_spec(folder))
    same(run(exported(folder, tmp_path / "out"), texts), run(TorchBackend(read_spec(folder)), texts), len(texts))


def test_a_file_of_eight_bits_is_served_as_such(bert: Path, tmp_path: Path) -> None:
    backend = exported(bert, tmp_path / "out", "int8")
    assert backend.dtype == "int8"
    found, expected = (run(one, random_encodings(backend.spec)).dense for one in (backend, TorchBackend(read_spec(bert))))
    assert found is not None
    assert expected is not None
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.mean() > LOOSE.mean


def test_too_much_loss_writes_nothing(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="too far"):
        export_model(find_model(ModelConfig(model_id=str(bert))), tmp_path / "out", "int8", Guard(worst=1.1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("largest", [0, 10**9])
def test_large_weights_lie_beside_the_file_and_others_in_it(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(module, "LARGEST_FILE", largest)
    out = tmp_path / "out"
    for _ in range(2):  # the second time over the first
        backend = exported(bert, out)
    data = out / "onnx" / "model.onnx_data"
    assert data.exists() == (largest == 0)
    texts = random_encodings(backend.spec)
    same(run(backend, texts), run(TorchBackend(read_spec(bert)), texts), len(texts))
    if data.exists():
        assert data.stat().st_size < 2 * (bert / "model.safetensors").stat().st_size


def test_the_ends_are_named_as_optimum_names_them(bert: Path, tmp_path: Path) -> None:
    exported(bert, tmp_path / "out")
    session = ort.InferenceSession(tmp_path / "out" / "onnx" / "model.onnx")
    assert [node.name for node in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [node.name for node in session.get_outputs()] == ["last_hidden_state"]


def test_splade_is_refused(splade: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="SPLADE"):
        export_model(find_model(ModelConfig(model_id=str(splade), pooling="splade")), tmp_path / "out")


def test_the_command_tells_what_it_wrote(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = ["--min-cosine", "0.5", "--min-mean-cosine", "0.5"]
    assert cli.main(["export", str(bert), str(tmp_path / "out"), "--dtype", "int8", *low]) == 0
    assert f"{tmp_path / 'out' / 'onnx' / 'model_quantized.onnx'}: " in capsys.readouterr().out


def test_the_command_refuses_with_the_figures(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(bert), str(tmp_path / "out"), "--dtype", "int8", "--min-cosine", "1.1"]) == 1
    assert "too far from float32" in capsys.readouterr().err


def test_the_command_exports_no_other_precision(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", str(bert), str(tmp_path / "out"), "--dtype", "float16"])
    assert "float32 or int8" in capsys.readouterr().err
