"""POST `/`, `/invocations` and `/vertex` of several models: the body's keys choose the route, whose
first capable model answers."""

import socket
import threading
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.server.app import context_for, create_models_app
from hybridtei.server.models import Models
from hybridtei.server.run import settings_of
from hybridtei.system.metrics import Registry
from tests.inference.engine import small
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import HANG

SPECS = {
    "embedder": small.dense_only(),
    "splade": small.splade(),
    "reranker": labelled("LABEL_0"),
    "classifier": labelled(*LABELS),
    "tagger": labelled(*TAGS, tags=True),
}
ORDERS = (
    ("reranker", "embedder"),
    ("embedder", "reranker"),
    ("tagger", "classifier", "reranker", "splade", "embedder"),
    ("classifier", "reranker", "embedder", "tagger"),
)
# A body, the route that its keys choose, and that route's body
QUESTION = {"query": "one two", "texts": ["one", "two three", "four"]}
SIMILARITY = {"inputs": {"source_sentence": "one", "sentences": ["one two", "three"]}}
BODIES = {
    "rerank": (QUESTION, "/rerank", QUESTION),
    "rerank as LiteLLM": ({"inputs": QUESTION}, "/rerank", QUESTION),
    "rerank with options": (
        QUESTION | {"return_text": True},
        "/rerank",
        QUESTION | {"return_text": True},
    ),
    "similarity": (SIMILARITY, "/similarity", SIMILARITY),
    "embed with normalize": ({"inputs": "one", "normalize": False}, "/embed", None),
    "embed with dimensions": ({"inputs": ["one", "two"], "dimensions": 4}, "/embed", None),
    "labels": ({"inputs": "one", "raw_scores": True}, "/predict", None),
    "labels of Hugging Face": ({"inputs": "one", "parameters": {"top_k": 1}}, "/predict", None),
}
# TEI's `/vertex` knows no similarity and no object within `inputs`
INSTANCES = [name for name in BODIES if name not in ("similarity", "rerank as LiteLLM")]


@contextmanager
def serving_all(order):
    """A client of one server with these models, in this order."""
    contexts = {}
    for name in order:
        registry = Registry()
        service = small.service(SPECS[name], registry=registry)
        model = ModelConfig(model_id=name)
        contexts[name] = context_for(service, ServerConfig(), model, registry)
    app = create_models_app(Models(contexts), ServerConfig(), schemas=None)
    server = uvicorn.Server(settings_of(app, ServerConfig(), app.state.limits, None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=HANG, trust_env=False) as client:
            yield client
        server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def clients():
    with ExitStack() as stack:
        yield {order: stack.enter_context(serving_all(order)) for order in ORDERS}


def answered(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/", "/invocations"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("name", BODIES)
def test_the_answer_is_that_of_the_route(clients, order, path, name):
    body, route, of_route = BODIES[name]
    expected = answered(clients[order], route, body if of_route is None else of_route)
    if name == "labels of Hugging Face":
        assert len(expected[0]) == 1
    assert answered(clients[order], path, body) == expected


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_instances_are_answered_each_by_its_own_route(clients, order):
    bodies = [BODIES[name] for name in INSTANCES]
    expected = [answered(clients[order], route, body) for body, route, _ in bodies]
    instances = {"instances": [body for body, _, _ in bodies]}
    assert answered(clients[order], "/vertex", instances) == {"predictions": expected}


@pytest.mark.parametrize(
    ("order", "route"),
    [(ORDERS[0], "/embed"), (ORDERS[1], "/embed"), (ORDERS[3], "/predict")],
)
@pytest.mark.parametrize("path", ["/", "/invocations", "/vertex"])
def test_texts_alone_go_to_the_first_model_that_answers_them(clients, order, route, path):
    body = {"inputs": "one"}
    expected = answered(clients[order], route, body)
    if path == "/vertex":
        body, expected = {"instances": [body]}, {"predictions": [expected]}
    assert answered(clients[order], path, body) == expected


def test_one_reranker_only_ranks_as_in_tei():
    with serving_all(("reranker",)) as client:
        assert "missing field `query`" in client.post("/", json={"inputs": "a"}).text
        body = {"inputs": "a", "raw_scores": True}
        assert "missing field `query`" in client.post("/", json=body).text


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_a_name_chooses_the_model(clients, path):
    client = clients["embedder", "reranker"]
    body = {"inputs": "one", "model": "reranker"}
    assert client.post(path, json=body).status_code != 200
    body = QUESTION | {"model": "reranker"}
    assert answered(client, path, body) == answered(client, "/m/reranker/rerank", QUESTION)
