"""The model that comes with the package is upstream's, byte for byte, or it is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtei.checkpoint import files
from hybridtei.checkpoint.files import READY_PACKAGE, READY_SHA256, embedded_model
from hybridtei.config import EMBEDDED_MODEL
from hybridtei.encoder import Encoder
from hybridtei.errors import LoadError, MissingArtifact


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another package of the same name, found before the real one; its model folder is empty."""
    model = tmp_path / READY_PACKAGE / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise ImportError('finding it should not import it')")
    monkeypatch.syspath_prepend(tmp_path)
    return model


def test_weights_of_another_hash_are_refused_with_both(package: Path) -> None:
    (package / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(LoadError, match=READY_SHA256) as caught:
        embedded_model()
    assert type(caught.value) is LoadError
    assert str(package / "model.safetensors") in str(caught.value)


def test_a_package_without_weights_is_missing_them(package: Path) -> None:
    with pytest.raises(MissingArtifact, match=str(package / "model.safetensors")):
        Encoder.load(EMBEDDED_MODEL)


def test_the_real_package_has_the_right_weights() -> None:
    folder, heads = embedded_model()
    assert (folder / "tokenizer.json").is_file()
    assert heads.suffix == ".safetensors"


def test_without_that_package_the_folder_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READY_PACKAGE", "hybridtei_no_such_package")
    monkeypatch.setattr(files, "assembled_model", lambda: tmp_path)
    assert embedded_model() == (tmp_path, files.EMBEDDED_HEADS)
