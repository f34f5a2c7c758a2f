"""`input_type`: queries of models that read them otherwise than documents, over HTTP as in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litestar.testing import TestClient

from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.encoder import Encoder
from hybridtei.engine.service import EngineService
from hybridtei.load import load_model
from hybridtei.server.app import create_app
from tests.test_inference_free import routed
from tests.test_late_interaction import pylate

TEXTS = ["baka bulo", "baka", "mo bulo baka"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"lookup": routed(tmp_path_factory.mktemp("lookup")), "late": pylate(tmp_path_factory.mktemp("late") / "m")}


def answers(folder: Path, path: str, body: dict[str, Any], **server: Any) -> Any:
    config = ModelConfig(model_id=str(folder))
    loaded = load_model(config, EngineConfig())
    service = EngineService(loaded.model, loaded.backend, EngineConfig(), budget_tokens=loaded.budget_tokens)
    with TestClient(create_app(service, ServerConfig(**server), config)) as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("split", [False, True])
def test_an_inference_free_model_looks_queries_up(folders, side, split):
    body = {"inputs": TEXTS, "outputs": ["sparse"], "sparse_format": "qdrant", "input_type": side}
    limits = {"max_client_batch_size": 2, "split_large_batches": True} if split else {}
    found = answers(folders["lookup"], "/embed_hybrid", body, **limits)
    expected = Encoder.load(str(folders["lookup"])).encode(TEXTS, ["sparse"], input_type=side).sparse
    for i, row in enumerate(found):
        indices, values = expected.row(i)
        assert row["sparse"]["indices"] == indices.tolist()
        np.testing.assert_allclose(row["sparse"]["values"], values, atol=1e-5)


@pytest.mark.parametrize("side", ["query", "document"])
def test_a_late_interaction_model_marks_queries(folders, side):
    found = answers(folders["late"], "/embed_multivector", {"inputs": TEXTS, "input_type": side})
    expected = Encoder.load(str(folders["late"])).encode(TEXTS, ["multivector"], input_type=side).multivector
    for i, rows in enumerate(found):
        np.testing.assert_allclose(rows, expected.row(i), atol=1e-5)
