"""A model's name that ends with `:query` or `:document`, as clients send it that have no other
field for it."""

import base64
import logging
import re

import httpx
import numpy as np
import ollama
import openai
import pytest

from hybridtei.config import NamedModel, ServerConfig
from hybridtei.server.app import context_for, create_models_app
from hybridtei.server.models import Models
from hybridtei.system.metrics import Registry
from tests.inference.engine import small
from tests.server.conftest import labelled
from tests.server.live import serving, serving_app

TEXTS = ["a hybrid search", "one two"]
PROMPTS = {"query": "query", "document": "passage"}


def named(alias, spec=None, **changes):
    registry = Registry()
    service = small.service(spec or small.model_spec(**changes), registry=registry)
    model = NamedModel(model_id=f"org/{alias}", alias=alias)
    return context_for(service, ServerConfig(), model, registry)


@pytest.fixture(scope="module")
def several():
    """Three models: one has no sides, and the name of one ends like a side of another."""
    contexts = {
        "small": named("small"),
        "plain": named("plain", prompts=None),
        "plain:query": named("plain:query"),
    }
    with serving_app(create_models_app(Models(contexts), ServerConfig(), schemas=None)) as url:
        yield url


def openai_client(base):
    client = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=base, api_key="none", http_client=client)


def expected(running, side, **fields):
    body = {"inputs": TEXTS, "prompt_name": PROMPTS[side], **fields}
    vectors: list[list[float]] = running.post("/embed", body).json()
    assert vectors != running.post("/embed", {"inputs": TEXTS, **fields}).json()
    return vectors


@pytest.mark.parametrize("side", PROMPTS)
@pytest.mark.parametrize("name", ["small", "org/small", "small:latest", "/m/small"])
def test_openais_and_ollamas_clients_reach_a_side_by_name(server, several, side, name):
    vectors = expected(server, side)
    base, model = f"{several}/v1", name
    if name.startswith("/m/"):
        base, model = f"{several}{name}:{side}/v1", "any"
    elif not name.endswith(":latest"):
        model = f"{name}:{side}"
    else:
        model = f"small:{side}:latest"
    client = openai_client(base)
    answer = client.embeddings.create(model=model, input=TEXTS, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(row.embedding), "<f4") for row in answer.data]
    np.testing.assert_array_equal(decoded, np.array(vectors, np.float32))
    assert answer.model == f"small:{side}"
    if name.startswith("/m/"):
        return
    of_ollama = ollama.Client(host=several, trust_env=False).embed(model, TEXTS)
    assert (of_ollama.embeddings, of_ollama.model) == (vectors, f"small:{side}")


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/embed", {"inputs": TEXTS}, lambda answer: answer),
        (
            "/embed_hybrid",
            {"inputs": TEXTS, "outputs": ["dense"]},
            lambda answer: [row["dense"] for row in answer],
        ),
        (
            "/v1/embeddings",
            {"input": TEXTS},
            lambda answer: [row["embedding"] for row in answer["data"]],
        ),
        (
            "/v2/embed",
            {"texts": TEXTS, "input_type": "classification"},
            lambda answer: answer["embeddings"]["float"],
        ),
        ("/api/embed", {"input": TEXTS}, lambda answer: answer["embeddings"]),
    ],
)
@pytest.mark.parametrize("side", PROMPTS)
def test_each_route_reads_the_side_and_a_field_outweighs_it(server, path, body, read, side):
    vectors = expected(server, side)
    assert read(server.post(path, {**body, "model": f"any:{side}"}).json()) == vectors
    assert read(server.post(f"/m/small:{side}{path}", body).json()) == vectors
    if path in ("/embed_hybrid", "/v1/embeddings"):
        field = {"input_type": "query" if side == "document" else "document"}
        other = expected(server, field["input_type"])
        assert read(server.post(path, {**body, **field, "model": f"any:{side}"}).json()) == other


def test_the_exact_name_comes_first(several):
    client = openai_client(f"{several}/v1")

    def vectors(model):
        answer = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        return answer.data[0].embedding

    # A model without sides, and another that is called like its query side
    assert vectors("plain") == vectors("plain:document") == vectors("small")
    assert vectors("plain:query") == vectors("small")
    assert vectors("plain:query:query") == vectors("small:query") != vectors("small")
    with pytest.raises(openai.NotFoundError, match="`small:corpus` is not served"):
        vectors("small:corpus")


def test_lists_name_the_sides(several):
    client = openai_client(f"{several}/v1")
    names = [
        "small",
        "small:query",
        "small:document",
        "plain",
        "plain:query",
        "plain:query:query",
        "plain:query:document",
    ]
    assert [model.id for model in client.models.list()] == names
    assert client.models.retrieve("small:query").id == "small:query"
    ollama_client = ollama.Client(host=several, trust_env=False)
    assert [model.model for model in ollama_client.list().models] == names
    assert ollama_client.show("small:document").capabilities == ["embedding"]


def test_tei_knows_no_sides():
    with serving(server={"only_tei_routes": True}) as tei:
        plain = tei.post("/embed", {"inputs": TEXTS}).json()
        assert tei.post("/embed", {"inputs": TEXTS, "model": "small:query"}).json() == plain


def test_a_request_without_a_side_is_counted_and_logged_once_an_hour(caplog):
    counter = "hybridtei_requests_without_side_total"
    with serving() as running, caplog.at_level(logging.WARNING):
        for body in ({"input_type": "query"}, {"prompt_name": "passage"}, {"model": "any:query"}):
            running.post("/embed_hybrid", {"inputs": "one", **body})
        # What is looked up is a query
        looked_up = {"inputs": "one", "query_encoder": "table"}
        assert running.post("/embed_sparse", looked_up).status_code == 200
        assert f"\n{counter} " not in running.get("/metrics").text
        for _ in range(3):
            running.post("/embed", {"inputs": "one"})
        assert f"\n{counter} 3\n" in running.get("/metrics").text
    lines = [record.getMessage() for record in caplog.records if ":query" in record.getMessage()]
    assert len(lines) == 1


def test_a_model_without_sides_counts_none(dense_server):
    dense_server.post("/embed", {"inputs": "one", "model": "any:query"})
    dense_server.post("/embed", {"inputs": "one"})
    assert "\nhybridtei_requests_without_side_total " not in dense_server.get("/metrics").text
    assert len(dense_server.get("/v1/models").json()["data"]) == 1


def posted(base, path, body):
    return httpx.post(f"{base}{path}", json=body, trust_env=False)


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_names_of_different_vectors_have_different_digests(several, path):
    """Ollama's clients take two names of one digest for one model."""
    models = httpx.get(f"{several}{path}", trust_env=False).json()["models"]
    assert len({model["digest"] for model in models}) == len(models) == 7
    assert all(re.fullmatch("[0-9a-f]{64}", model["digest"]) for model in models)


@pytest.mark.parametrize("path", ["/api/show", "/api/pull"])
def test_ollamas_older_name_of_the_model(several, path):
    for name in ("plain", "small:query"):
        by_name, by_model = (posted(several, path, {key: name}) for key in ("name", "model"))
        assert by_name.status_code == 200
        assert by_name.json() == by_model.json()
    missing = posted(several, path, {"name": "is-not-served"})
    assert (missing.status_code, "is-not-served" in missing.json()["error"]) == (404, True)
    # Ollama takes the first of the two that is not empty
    assert posted(several, path, {"model": "", "name": "is-not-served"}).status_code == 404
    assert posted(several, path, {"model": "small", "name": "is-not-served"}).status_code == 200


def test_a_model_of_another_kind_names_those_that_can():
    contexts = {
        "small": named("small"),
        "ranks": named("ranks", spec=labelled("LABEL_0")),
    }
    app = create_models_app(Models(contexts), ServerConfig(), schemas=None)
    with serving_app(app) as url:
        for path, body in (
            ("/api/embed", {"model": "ranks:latest", "input": "one"}),
            ("/v1/embeddings", {"model": "ranks", "input": "one"}),
            ("/m/ranks/embed", {"inputs": "one"}),
        ):
            answer = posted(url, path, body)
            assert answer.status_code == 424
            assert "odel is not an embedding model; here `small` can" in answer.text
        # TEI's sentence alone where no other model could
        answer = posted(url, "/predict_tokens", {"model": "small", "inputs": "one"})
        assert "can" not in answer.json()["error"]
