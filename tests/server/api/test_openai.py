"""OpenAI's route. Its errors: conformance/wire; its own client: conformance/clients."""

from __future__ import annotations

import pytest

from tests.inference.engine import small
from tests.server.live import serving


def dense(server, *texts: str) -> list[list[float]]:
    return server.post("/embed", {"inputs": list(texts)}).json()


@pytest.mark.parametrize("given", ["one", ["one"], [2, small.IDS["one"], 3], [[2, small.IDS["one"], 3]]])
def test_every_form_of_input(server, given):
    assert server.post("/v1/embeddings", {"input": given}).json()["data"][0]["embedding"] == dense(server, "one")[0]


def test_outputs_stand_beside_the_embedding(server):
    body = {"input": ["one two", "three"], "outputs": ["dense", "sparse", "multivector"]}
    hybrid = server.post("/embed_hybrid", {"inputs": body["input"], "sparse_format": "qdrant"}).json()
    data = server.post("/v1/embeddings", body).json()["data"]
    assert [item["embedding"] for item in data] == [item["dense"] for item in hybrid]
    assert [item["sparse_embedding"] for item in data] == [item["sparse"] for item in hybrid]
    assert [item["multivector"] for item in data] == [item["multivector"] for item in hybrid]
    (item, _) = server.post("/v1/embeddings", {**body, "sparse_format": "tei"}).json()["data"]
    assert item["sparse_embedding"] == server.post("/embed_sparse", {"inputs": "one two"}).json()[0]


def test_splade_has_no_normalised_vector_but_its_sparse_one(splade_server):
    response = splade_server.post("/v1/embeddings", {"input": "one"})
    message = "Backend error: `normalize` is not available for SPLADE models"
    assert response.status_code == 424
    assert response.json() == {"message": message, "code": 424, "type": "Backend"}
    (item,) = splade_server.post("/v1/embeddings", {"input": "one", "outputs": ["sparse"]}).json()["data"]
    assert item["sparse_embedding"]["indices"]
    assert "embedding" not in item


def test_served_model_name():
    with serving(server={"served_model_name": 'my "model"'}) as running:
        assert running.post("/v1/embeddings", {"input": "one"}).json()["model"] == 'my "model"'
        assert running.get("/info").json()["served_model_name"] == 'my "model"'


def test_sparse_vectors_by_token_id(server):
    asked = {"inputs": ["one two"], "outputs": ["sparse"]}
    (row,) = server.post("/embed_sparse", {"inputs": ["one two"]}).json()
    answer = server.post("/embed_hybrid", {**asked, "sparse_format": "ids"}).json()
    assert answer[0]["sparse"] == {str(one["index"]): one["value"] for one in row}
