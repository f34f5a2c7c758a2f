"""TEI's inference routes: values that agree with each other, and what is ours. Shapes and errors:
conformance/wire."""

import asyncio
import tracemalloc

import msgspec
import numpy as np
import pytest

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.server.answers import to_json
from hybridtei.server.api.tei import TokenizeRequest, tokenize
from hybridtei.server.app import context_for
from hybridtei.server.context import OFFLOAD_NUMBERS
from hybridtei.system.metrics import Registry
from tests.inference.engine import small

TOLERANCE = 1e-6


def vectors(response):
    assert response.status_code == 200, response.text
    return np.array(response.json(), dtype=np.float32)


def test_sparse_queries_that_are_looked_up(server):
    before = server.backend.forwards
    response = server.post(
        "/embed_sparse", {"inputs": ["one two one", "seven"], "query_encoder": "table"}
    )
    assert server.backend.forwards == before
    assert response.headers["x-query-encoder"] == "table"
    assert [[item["value"] for item in row] for row in response.json()] == [[1.0, 1.0], [1.0]]
    assert "x-query-encoder" not in server.post("/embed_sparse", {"inputs": "one"}).headers
    refused = server.post("/embed_sparse", {"inputs": "", "query_encoder": "table"})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "Empty")


def test_splade_gives_sparse_and_its_dense_form(splade_server):
    (row,) = splade_server.post("/embed_sparse", {"inputs": "one two"}).json()
    (dense,) = splade_server.post("/embed", {"inputs": "one two", "normalize": False}).json()
    assert len(dense) == len(small.PIECES)
    assert {i: value for i, value in enumerate(dense) if value} == {
        entry["index"]: entry["value"] for entry in row
    }
    near = splade_server.post(
        "/similarity", {"inputs": {"source_sentence": "one", "sentences": ["one", "two"]}}
    ).json()
    assert near[0] == pytest.approx(1, abs=TOLERANCE)
    assert near[0] > near[1] > 0


@pytest.mark.parametrize(
    ("which", "path", "body", "error"),
    [
        (
            "dense_server",
            "/embed_multivector",
            {"inputs": "one"},
            "Model has no `multivector` output. It has: dense, tokens",
        ),
        (
            "dense_server",
            "/embed_hybrid",
            {"inputs": "one", "outputs": ["sparse", "dense"]},
            "Model has no `sparse` output. It has: dense, tokens",
        ),
        (
            "splade_server",
            "/embed_hybrid",
            {"inputs": "one", "outputs": ["dense"]},
            "Model has no `dense` output. It has: sparse",
        ),
    ],
)
def test_an_output_the_model_lacks(request, which, path, body, error):
    response = request.getfixturevalue(which).post(path, body)
    assert response.status_code == 424
    assert response.json() == {"error": f"Backend error: {error}", "error_type": "Backend"}


def test_much_work_beside_the_passes_is_refused_not_queued_for_ever(server):
    with server.service.beside.inside(server.service.beside.free):
        refused = [
            server.post("/tokenize", {"inputs": "one"}),
            server.post("/decode", {"ids": [5]}),
        ]
        assert [response.status_code for response in refused] == [429, 429]
        assert server.post("/embed", {"inputs": "one"}).status_code == 200
    assert server.post("/tokenize", {"inputs": "one"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {"prompt": "one two three"}, 422, "field `inputs`"),
        (
            "/decode",
            {"ids": [[5], [5] * 70_000]},
            422,
            "`ids` must have less than 16000 ids. Given: 70000",
        ),
    ],
)
def test_refusals_name_the_field(server, path, body, status, message):
    response = server.post(path, body)
    assert response.status_code == status
    assert message in response.text


def test_many_tokens_are_written_aside_and_take_a_few_times_their_answer():
    """As objects they would take ten times as much, and stand still all that the event loop has to
    do."""
    context = context_for(
        small.service(), ServerConfig(), ModelConfig(model_id="small"), Registry()
    )

    turns, aside = [], context.service.aside
    context.service.aside = lambda work: turns.append(work) or aside(work)

    async def asked():
        return await tokenize(context, TokenizeRequest(inputs=["a " * 4000] * 32))

    reply = asyncio.run(asked())
    # Other requests use the thread after each 65,536 characters
    assert len(turns) == 4
    tracemalloc.start()
    try:
        body = to_json(reply.answer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    texts = msgspec.json.decode(body)
    assert [len(tokens) for tokens in texts] == [4002] * 32
    assert texts[0][1] == {
        "id": small.IDS["a"],
        "text": "a",
        "special": False,
        "start": 0,
        "stop": 1,
    }
    assert reply.numbers > OFFLOAD_NUMBERS
    assert peak < 4 * len(body)
