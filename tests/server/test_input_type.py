"""`input_type` and the checkpoint's default prompt: how a text is read, over HTTP as in process."""

import pytest
from litestar.testing import TestClient

from conformance.small import tiny, tolerances
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.encoder import Encoder
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import load_model
from hybridtei.server.start import ModelLoader
from tests.inference.test_inference_free import routed
from tests.near import near
from tests.server.live import create_app

TEXTS = ["baka bulo", "baka", "mo bulo baka"]


def answers(folder, path, body, engine=None, **server):
    config, engine = ModelConfig(model_id=str(folder)), engine or EngineConfig()
    loaded = load_model(config, engine)
    service = EngineService(
        loaded.model, loaded.backend, engine, budget_tokens=loaded.budget_tokens
    )
    with TestClient(create_app(service, ServerConfig(**server), config)) as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("split", [False, True])
def test_an_inference_free_model_looks_queries_up(tmp_path, side, split):
    folder = routed(tmp_path)
    body = {"inputs": TEXTS, "outputs": ["sparse"], "sparse_format": "qdrant", "input_type": side}
    limits = {"max_client_batch_size": 2, "split_large_batches": True} if split else {}
    found = answers(folder, "/embed_hybrid", body, **limits)
    expected = Encoder.load(str(folder)).encode(TEXTS, ["sparse"], input_type=side).sparse
    for i, row in enumerate(found):
        indices, values = expected.row(i)
        assert row["sparse"]["indices"] == indices.tolist()
        near(row["sparse"]["values"], values, 1e-5)


PROMPTS = {"query": "lolo mo ", "s2p": "bulo bulo "}
OF_TEI = {
    "/embed": ({"inputs": TEXTS}, lambda answer: answer),
    "/similarity": ({"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}, None),
    "/v1/embeddings": (
        {"input": TEXTS},
        lambda answer: [one["embedding"] for one in answer["data"]],
    ),
    "/tokenize": ({"inputs": TEXTS}, None),
}
OF_OTHERS = {
    "/embed_hybrid": ({"inputs": TEXTS}, lambda answer: [one["dense"] for one in answer]),
    "/v2/embed": (
        {"texts": TEXTS, "embedding_types": ["float"]},
        lambda answer: answer["embeddings"]["float"],
    ),
    "/api/embed": ({"input": TEXTS}, lambda answer: answer["embeddings"]),
}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    folder = tiny.write_family(tmp_path_factory.mktemp("prompted"), "bert")
    return tiny.write_modules(folder, prompts=PROMPTS, default_prompt_name="s2p")


@pytest.mark.parametrize("path", [*OF_TEI, *OF_OTHERS])
@pytest.mark.parametrize("asked", [False, True])
def test_the_default_prompt_of_a_checkpoint_is_for_routes_that_tei_lacks(prompted, path, asked):
    body, rows_of = {**OF_TEI, **OF_OTHERS}[path]
    engine = EngineConfig(use_default_prompt=asked)
    found = answers(prompted, path, body, engine)
    applies = asked or path in OF_OTHERS
    if rows_of is None:
        assert found == answers(
            prompted, path, body, EngineConfig(default_prompt=PROMPTS["s2p"] if applies else "")
        )
        return
    expected = (
        Encoder.load(str(prompted), default_prompt="")
        .encode(TEXTS, prompt_name="s2p" if applies else None)
        .dense
    )
    near(rows_of(found), expected, tolerances.UNIT["float32"])


@pytest.mark.parametrize(("asked", "lines"), [(False, 1), (True, 0)])
def test_a_start_tells_of_a_default_prompt_that_routes_of_tei_leave_out(
    prompted, asked, lines, caplog
):
    caplog.set_level("INFO")
    ModelLoader(EngineConfig(use_default_prompt=asked)).load(ModelConfig(model_id=str(prompted)))
    assert (
        len(
            [line for line in caplog.messages if "`s2p`" in line and "--use-default-prompt" in line]
        )
        == lines
    )


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed"])
@pytest.mark.parametrize(
    ("value", "side"),
    [
        ("query", "query"),
        ("search_query", "query"),
        ("passage", "document"),
        ("search_document", "document"),
        ("document", "document"),
        ("classification", None),
    ],
)
def test_a_side_under_the_name_of_another_api(tmp_path, path, value, side):
    body, rows_of = {**OF_TEI, **OF_OTHERS}[path]
    folder = tiny.write_family(tmp_path, "bert")
    tiny.write_modules(folder, prompts={"query": "lolo mo ", "document": "bulo "})
    found = rows_of(answers(folder, path, {**body, "input_type": value}))
    expected = Encoder.load(str(folder)).encode(TEXTS, input_type=side).dense
    near(found, expected, tolerances.UNIT["float32"])
