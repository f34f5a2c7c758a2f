"""A whole checkpoint with something wrong in it: an error of the right class that names the file, never random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridtei.checkpoint.spec import read_spec
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture, WeightMismatch
from tests import tiny

Copied = Callable[[Path], Path]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def raised(folder: Path, kind: type[LoadError], name: str) -> str:
    with pytest.raises(LoadError) as caught:
        Encoder.load(str(folder))
    assert type(caught.value) is kind
    assert str(folder / name) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(bert: Path, copied: Copied, name: str) -> None:
    folder = copied(bert)
    (folder / name).unlink()
    raised(folder, MissingArtifact, name)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", POINTER])
def test_a_file_of_no_content_or_a_pointer(bert: Path, copied: Copied, name: str, content: bytes) -> None:
    folder = copied(bert)
    (folder / name).write_bytes(content)
    raised(folder, MissingArtifact, name)


@pytest.mark.parametrize("left", [7, 100, -1, -4000])
def test_truncated_weights(bert: Path, copied: Copied, left: int) -> None:
    folder = copied(bert)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:left])
    raised(folder, LoadError, "")


def test_a_tokenizer_that_is_none(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    raised(folder, LoadError, "tokenizer.json")


@pytest.mark.parametrize("architecture", [["BertForSequenceClassification"], ["XLMRobertaForTokenClassification"]])
def test_an_embedding_model_that_calls_itself_a_classifier(bert: Path, copied: Copied, architecture: list[str]) -> None:
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", architectures=architecture)
    spec = read_spec(folder)  # by its modules, and without the weights of a head
    assert (spec.kind, spec.pooling) == ("embedding", ("mean",))
    (folder / "modules.json").unlink()
    assert "the weights lack" in raised(folder, WeightMismatch, "")


def test_a_family_that_nobody_knows(bert: Path, copied: Copied) -> None:
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", model_type="gizmo", architectures=["GizmoModel"])
    assert "gizmo" in raised(folder, UnsupportedArchitecture, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3},
        {"intermediate_size": 50},
        {"vocab_size": 2000},
        {"max_position_embeddings": 512},
        {"hidden_size": 64},
    ],
)
def test_a_config_that_the_weights_do_not_fit(bert: Path, copied: Copied, changes: dict[str, object]) -> None:
    """Nothing is made up for what is missing or has another shape."""
    folder = copied(bert)
    tiny.edit_json(folder / "config.json", **changes)
    with pytest.raises(LoadError, match=str(folder)):
        Encoder.load(str(folder))


def test_weights_of_another_model(bert: Path, copied: Copied, tmp_path: Path) -> None:
    folder = copied(bert)
    other = tiny.write_family(tmp_path, "qwen3")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    raised(folder, WeightMismatch, "")


def with_dense(tmp_path: Path, activation: str = "torch.nn.Tanh") -> Path:
    return tiny.write_modules(tiny.write_family(tmp_path, "bert"), dense=[(tiny.HIDDEN, 12, activation)])


def test_a_dense_module_without_weights(tmp_path: Path) -> None:
    folder = with_dense(tmp_path)
    (folder / "2_Dense" / "model.safetensors").unlink()
    raised(folder, MissingArtifact, "2_Dense/model.safetensors")


def test_a_dense_module_of_another_shape(tmp_path: Path) -> None:
    folder = with_dense(tmp_path)
    tiny.edit_json(folder / "2_Dense" / "config.json", out_features=13)
    raised(folder, WeightMismatch, "2_Dense/model.safetensors")


def test_a_dense_module_that_does_not_follow_from_the_pooling(tmp_path: Path) -> None:
    folder = with_dense(tmp_path)
    tiny.write_dense(folder / "2_Dense", tiny.HIDDEN + 1, 12)
    raised(folder, WeightMismatch, "2_Dense/config.json")


def test_an_activation_that_is_code(tmp_path: Path) -> None:
    assert "os.system" in raised(with_dense(tmp_path, "os.system"), UnsupportedArchitecture, "2_Dense/config.json")


def test_code_that_comes_with_a_model_is_not_run(bert: Path, copied: Copied, tmp_path: Path) -> None:
    folder = copied(bert)
    left_behind = tmp_path / "left-behind"
    (folder / "configuration_gizmo.py").write_text(f"open({str(left_behind)!r}, 'w')")
    tiny.edit_json(folder / "config.json", model_type="gizmo", auto_map={"AutoConfig": "configuration_gizmo.GizmoConfig"})
    raised(folder, UnsupportedArchitecture, "config.json")
    assert not left_behind.exists()


def test_a_longer_model_than_a_pass_is_cut_or_refused(bert: Path) -> None:
    config = ModelConfig(model_id=str(bert))
    assert Encoder.load(config=config, engine=EngineConfig(max_batch_tokens=50)).max_input_length == 50
    with pytest.raises(LoadError, match=r"128.*50"):
        Encoder.load(config=config, engine=EngineConfig(max_batch_tokens=50, auto_truncate=False))
