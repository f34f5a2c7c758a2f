"""What is checked once a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridtei import load
from hybridtei.backends.torch_backend import TorchBackend
from hybridtei.batch import PackedBatch
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError
from hybridtei.load import load_model
from hybridtei.trunk import pretrained
from tests import tiny, vocabulary
from tests.checkpoint.test_modules import in_its_own_folder
from tests.trunk.test_rope import LONG


def loaded(folder: Path, **engine: Any) -> load.LoadedModel:
    return load_model(ModelConfig(model_id=str(folder), pooling="mean"), EngineConfig(**engine))


def test_the_self_test_has_a_short_text_and_a_long_one(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[list[int]] = []
    forward = TorchBackend.forward

    def counted(backend: TorchBackend, batch: PackedBatch) -> Any:
        lengths.append(batch.lengths.tolist())
        return forward(backend, batch)

    monkeypatch.setattr(TorchBackend, "forward", counted)
    loaded(bert)
    assert lengths[0] == [3, vocabulary.LONGEST]
    lengths.clear()
    loaded(bert, max_batch_tokens=50)
    assert lengths[0] == [3, 50]
    lengths.clear()
    monkeypatch.setattr(load, "SELF_TEST_TOKENS", 20)
    loaded(bert)
    assert lengths[0] == [3, 20]


def test_a_model_whose_texts_depend_on_their_neighbours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_family(tmp_path, "qwen2", rope_parameters=LONG)
    assert loaded(folder).model.spec.model_type == "qwen2"
    monkeypatch.setattr(pretrained, "forget_lengths", lambda model: False)
    with pytest.raises(LoadError, match=f"{folder}: self-test"):
        loaded(folder)


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_a_model_of_very_short_texts_loads(tmp_path: Path, longest: int) -> None:
    folder = tiny.write_family(tmp_path, "bert", max_position_embeddings=longest)
    assert loaded(folder).model.reader.max_input_length == longest


def test_a_transformer_in_a_folder_of_its_own_gives_the_same_vectors(bert: Path, tmp_path: Path) -> None:
    import shutil

    from hybridtei.encoder import Encoder

    folder = in_its_own_folder(shutil.copytree(bert, tmp_path / "old"))
    texts = vocabulary.texts(5, most=20)
    ours, theirs = Encoder.load(str(folder)).encode(texts).dense, Encoder.load(str(bert)).encode(texts).dense
    assert ours is not None
    assert theirs is not None
    np.testing.assert_array_equal(ours, theirs)
