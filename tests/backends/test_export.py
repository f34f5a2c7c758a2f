"""The exporter: one graph serves every checkpoint of a shape, and one that would be wrong for any of them is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridtei import cli
from hybridtei.backends import export
from hybridtei.backends.export import check_graph, export_graph
from hybridtei.backends.graph_names import FAMILY_IRRELEVANT, FREE_SIZES, graph_name
from hybridtei.backends.graphs import Graph
from hybridtei.checkpoint.spec import read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from tests import exports, tiny
from tests.exports import FAMILIES, graph_of
from tests.trunk.test_rope import MODELS as FOLLOWING

Copied = Callable[[Path], Path]


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Rewrite a checkpoint's tensors."""
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return folder


def checked(folder: Path, graph: Graph) -> None:
    check_graph(read_spec(folder, pooling="mean"), graph, Weights.open(folder))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_graph_holds_no_weights(model_type: str, tmp_path: Path) -> None:
    graph = graph_of(model_type)
    model = onnx.load_from_string(graph.onnx)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    assert all(not tensors[name].raw_data and tuple(tensors[name].dims) == shape for name, shape in graph.weights.items())
    assert sum(len(tensor.raw_data) for name, tensor in tensors.items() if name not in graph.weights) < 4096
    file = tiny.write_family(tmp_path, model_type) / "model.safetensors"
    assert set(graph.weights) == {name for name in load_file(file) if "pooler" not in name}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_graph_keeps_nothing_of_the_machine_that_made_it(model_type: str) -> None:
    content = graph_of(model_type).onnx
    assert not [word for word in (b"site-packages", b"/tmp", str(Path.home()).encode(), b".py") if word in content]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FREE_SIZES))
def test_a_graph_is_free_of_the_sizes_its_name_leaves_out(tmp_path: Path, model_type: str) -> None:
    """Byte for byte: other numbers of words and of positions, another padding id where the name leaves it out too; and of the
    precision that weights are stored in."""
    others = {
        key: size for key, size in {"vocab_size": 333, "max_position_embeddings": 777}.items() if key in FREE_SIZES[model_type]
    }
    if "pad_token_id" in FAMILY_IRRELEVANT.get(model_type, ()):
        others["pad_token_id"] = 7
    layers = {"n_layers" if model_type == "distilbert" else "num_hidden_layers": 1 if model_type == "distilbert" else 2}
    spec = read_spec(tiny.write_family(tmp_path / "one", model_type, **layers), pooling="mean")
    half = change(
        tiny.write_family(tmp_path / "other", model_type, **layers, **others),
        lambda tensors: {name: tensor.half() for name, tensor in tensors.items()},
    )
    tiny.edit_json(half / "config.json", dtype="float16")
    other = read_spec(half, pooling="mean")
    assert graph_name(spec) == graph_name(other)
    graphs = export_graph(spec), export_graph(other)
    for graph, name in zip(graphs, ("one.zip", "other.zip"), strict=True):
        graph.write(tmp_path / name)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()
    assert graphs[0].free


@pytest.mark.slow
def test_the_graphs_beside_the_tests_are_those_that_the_exporter_makes(tmp_path: Path) -> None:
    """If not, the command in `tests/exports.py` makes them anew."""
    run = [sys.executable, "-m", "tests.exports", str(tmp_path)]
    subprocess.run(run, check=True, cwd=Path(exports.__file__).parents[1], env={**os.environ, "PYTHONHASHSEED": "0"})
    made, kept = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path, exports.GRAPHS))
    assert made == kept


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"layer_norm_eps": 0.5}, {"num_attention_heads": 2}])
def test_a_graph_that_computes_something_else_is_refused(bert: Path, copied: Copied, changes: dict[str, Any]) -> None:
    checked(bert, graph_of("bert"))
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"{folder}.*differs from torch by"):
        checked(folder, graph_of("bert"))


def test_a_graph_of_another_window_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_family(tmp_path, "modernbert", local_attention=2 * tiny.WINDOW)
    with pytest.raises(UnsupportedArchitecture, match="differs from torch by"):
        checked(folder, graph_of("modernbert"))


def test_a_fault_that_only_long_texts_show_is_found(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    change(folder, lambda tensors: {**tensors, POSITIONS: tensors[POSITIONS].index_fill(0, torch.tensor(110), 3.0)})
    with pytest.raises(UnsupportedArchitecture, match="differs from torch by"):
        check_graph(read_spec(bert), graph_of("bert"), Weights.open(folder))


POSITIONS = "embeddings.position_embeddings.weight"


def test_nan_is_refused_before_it_could_agree(bert: Path, copied: Copied) -> None:
    folder = change(copied(bert), lambda tensors: {**tensors, POSITIONS: torch.full_like(tensors[POSITIONS], torch.nan)})
    with pytest.raises(LoadError, match=f"`{POSITIONS}` holds NaN"):
        check_graph(read_spec(bert), graph_of("bert"), Weights.open(folder))


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_rotary_embedding_that_follows_the_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A trace would freeze the frequencies of the traced length. It is not even begun."""
    monkeypatch.setattr(export, "_trace", lambda *_: pytest.fail("traced"))
    model_type, settings = FOLLOWING[name]
    folder = tiny.write_family(tmp_path, model_type, **settings)
    with pytest.raises(UnsupportedArchitecture, match=f"{folder}: its rotary embedding follows the length"):
        export_graph(read_spec(folder, pooling="mean"))


def test_weights_that_transformers_renames_would_stay_in_the_graph_and_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old BERTs say `LayerNorm.gamma`: transformers takes them, but their graph would carry them to other checkpoints."""
    folder = change(
        tiny.write_family(tmp_path, "bert"),
        lambda tensors: {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()},
    )
    monkeypatch.setattr(export, "_trace", lambda module: only_weights(module.trunk))
    with pytest.raises(UnsupportedArchitecture, match=rf"{folder}: 5 weights.*LayerNorm\.weight"):
        export_graph(read_spec(folder, pooling="mean"))


def only_weights(trunk: Any) -> onnx_ir.Model:
    """What a trace gives, but for its nodes."""
    tensors = {name: value.detach().numpy() for name, value in trunk.named_parameters() if "pooler" not in name}
    initializers = [onnx.numpy_helper.from_array(value, f"trunk.{name}") for name, value in tensors.items()]
    return onnx_ir.from_proto(onnx.helper.make_model(onnx.helper.make_graph([], "trunk", [], [], initializers)))


def test_a_model_that_cannot_be_loaded_or_traced_is_refused_with_the_reason(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("data-dependent control flow")

    monkeypatch.setattr(export, "_trace", fail)
    with pytest.raises(UnsupportedArchitecture, match=f"{bert}: cannot be exported to ONNX: data-dependent"):
        export_graph(read_spec(bert))


def test_weights_that_are_missing_are_an_error(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingArtifact, match=r"model\.safetensors"):
        export_graph(read_spec(folder))
    assert issubclass(WeightMismatch, LoadError)


# --- the command -------------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> int:
    return cli.main(["export", *arguments, "--graph-only"])


@pytest.mark.slow
def test_the_command_gives_the_same_graph_from_weights_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = change(
        tiny.write_family(tmp_path / "model", "bert"),
        lambda tensors: {name: tensor.half() for name, tensor in tensors.items()},
    )
    tiny.edit_json(folder / "config.json", dtype="float16")
    assert run_command(str(folder), str(tmp_path / "out" / "graphs")) == 0
    (written,) = (tmp_path / "out" / "graphs").iterdir()
    assert written.name == graph_name(read_spec(folder, pooling="mean"))
    config = read_spec(folder, pooling="mean").config
    assert Graph.read(written, config) == graph_of("bert")
    assert f"{written}: {written.stat().st_size} bytes" in capsys.readouterr().out


def test_the_command_writes_to_the_cache_unless_told(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(export, "export_graph", lambda spec: Graph(b"onnx", {"a": (1,)}))
    assert run_command(str(bert)) == 0
    assert Graph.read(tmp_path / "cache" / graph_name(read_spec(bert)), {}) == Graph(b"onnx", {"a": (1,)})
    assert "1 tensors" in capsys.readouterr().out


def test_the_command_ends_with_1_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(str(tmp_path / "nowhere")) == 1
    told = capsys.readouterr()
    assert told.err == f"Error: {tmp_path / 'nowhere'}: no such folder\n"
    assert told.out == ""


def test_a_place_that_cannot_be_written_is_an_error(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "export_graph", lambda spec: Graph(b"onnx", {}))
    (tmp_path / "file").write_text("")
    assert run_command(str(bert), str(tmp_path / "file")) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_model_without_a_pooling_is_exported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "export_graph", lambda spec: Graph(b"onnx", {}))
    folder = tiny.write_family(tmp_path / "model", "qwen3")
    assert run_command(str(folder), str(tmp_path / "out")) == 0
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
