"""Three models in one process, by the real command: embed, rerank and tag; each by its alias; one
loaded beside the others."""

from contextlib import contextmanager

import httpx
import pytest

from conformance.small import tiny
from tests.server.live import commanded, process

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    return {
        "ranker": tiny.write_classifier(folder / "ranker", "bert"),
        "tagger": tiny.write_classifier(folder / "tagger", "bert", 3, task="TokenClassification"),
    }


@contextmanager
def in_a_process(*flags):
    words = [
        "-m",
        "hybridtei",
        "serve",
        "--port",
        "0",
        "--hostname",
        "127.0.0.1",
        "--engine-process",
        "true",
        *flags,
    ]
    with process(words) as running:
        yield running.wait_ready()
        assert any("gone is not served" in line for line in running.lines)
        running.terminate()
        assert running.wait() == 0


@pytest.fixture(
    scope="module", params=[commanded, pytest.param(in_a_process, marks=pytest.mark.slow)]
)
def client(
    request,
    hybrid,
    checkpoints,
    tmp_path_factory,
):
    listed = tmp_path_factory.mktemp("list") / "models.toml"
    models = {"hybrid": hybrid, **checkpoints, "gone": hybrid.parent / "gone"}
    listed.write_text(
        "".join(
            f"[[model]]\nmodel_id = '{path}'\nalias = '{alias}'\n" for alias, path in models.items()
        )
    )
    with (
        request.param("--models", str(listed), "--api-key", "secret", "--offline") as url,
        httpx.Client(base_url=url, headers=KEY, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_embed_rerank_and_tag_from_one_process(client):
    texts = ["baka bulo", "bomo", "bake balo baka"]
    vectors = client.post("/embed_hybrid", json={"inputs": texts}).json()
    assert [set(row) for row in vectors] == [{"dense", "sparse", "multivector"}] * 3
    ranks = client.post("/rerank", json={"query": "baka", "texts": texts}).json()
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    best = texts[ranks[0]["index"]]
    (tokens,) = client.post("/predict_tokens", json={"inputs": [[best]]}).json()
    assert [best[token["start"] : token["end"]] for token in tokens] == [
        token["token"] for token in tokens
    ]


def test_a_model_has_all_routes_below_its_alias(client):
    assert set(client.get("/m/ranker/info").json()["model_type"]) == {"reranker"}
    assert set(client.get("/m/hybrid/info").json()["model_type"]) == {"embedding"}
    pair = {"query": "baka", "texts": ["bulo"]}
    assert (
        client.post("/m/ranker/rerank", json=pair).json()
        == client.post("/rerank", json=pair).json()
    )
    assert client.post("/m/ranker/embed", json={"inputs": "baka"}).status_code == 424
    assert client.get("/m/ranker/health").status_code == 200
    assert "te_request_count" in client.get("/m/ranker/metrics").text


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (
            "/embed",
            {"inputs": "baka", "model": "nobody"},
            404,
            "`nobody` is not served here; served are `hybrid`, `ranker`",
        ),
        ("/m/nobody/embed", {"inputs": "baka"}, 404, "`nobody` is not served here"),
        ("/embed", {"inputs": "baka", "model": "gone"}, 404, "`gone` is failed"),
        ("/embed", {"inputs": "baka", "model": "tagger"}, 424, "not an embedding model"),
        ("/models/load", {"model_id": "/nowhere"}, 422, "no such folder"),
        (
            "/models/load",
            {"model_id": "/nowhere", "alias": "hybrid"},
            422,
            "`hybrid` is ready already",
        ),
        ("/models/load", {"alias": "a"}, 422, "`model_id` should be a text"),
        (
            "/models/load",
            {"model_id": "a", "trust_remote_code": True},
            422,
            "`trust_remote_code` is set for the whole process",
        ),
        (
            "/models/load",
            {"model_id": "org/name", "offline": False},
            422,
            "`offline` is set for the whole process",
        ),
        (
            "/models/load",
            {"model_id": "a", "quantization_ranges": "/dev/zero"},
            422,
            "`quantization_ranges` is set for the",
        ),
        ("/models/unload", {"model": "nobody"}, 404, "not served here"),
    ],
)
def test_what_is_wrong_is_named(client, path, body, status, error):
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert error in answer.json()["error"]


@pytest.mark.parametrize("alias", ["hybrid", "zzz", ""])
@pytest.mark.parametrize(
    "path", ["models/load", "models/unload", "collections/c/import", "collections/c/export"]
)
def test_what_manages_has_one_path_only(client, alias, path):
    method = "GET" if path.endswith("export") else "POST"
    answer = client.request(
        method, f"/m/{alias}/{path}", json={"model": "tagger", "model_id": "/nowhere"}
    )
    assert (answer.status_code, "there is no path" in answer.text) == (404, True)
    assert "tagger" in [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_a_model_comes_and_goes_while_another_answers(client, checkpoints):
    loaded = client.post(
        "/models/load", json={"model_id": str(checkpoints["tagger"]), "alias": "again"}
    )
    assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
    named = {"inputs": [["baka"]]}
    assert (
        client.post("/m/again/predict_tokens", json=named).json()
        == client.post("/predict_tokens", json=named).json()
    )
    assert "again" in [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert client.post("/models/unload", json={"model": "again"}).json() == {
        "model": "again",
        "state": "unloaded",
    }
    assert client.post("/m/again/predict_tokens", json=named).status_code == 404
