"""OpenAI's route. Its errors: conformance/wire; its own client: conformance/clients."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.inference.engine import small
from tests.server.live import serving

PATHS = pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])


def dense(server, *texts: str) -> list[list[float]]:
    return server.post("/embed", {"inputs": list(texts)}).json()


@PATHS
def test_shape_and_usage(server, path):
    response = server.post(path, {"input": ["one", "two three"], "model": "whatever", "user": "me"})
    one, two = dense(server, "one", "two three")
    body = response.json()
    assert list(body) == ["object", "data", "model", "usage"]
    assert body == {
        "object": "list",
        "data": [
            {"object": "embedding", "embedding": one, "index": 0},
            {"object": "embedding", "embedding": two, "index": 1},
        ],
        "model": "small",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert response.headers["x-compute-tokens"] == "7"


@pytest.mark.parametrize("given", ["one", ["one"], [2, small.IDS["one"], 3], [[2, small.IDS["one"], 3]]])
def test_every_form_of_input(server, given):
    assert server.post("/v1/embeddings", {"input": given}).json()["data"][0]["embedding"] == dense(server, "one")[0]


def test_base64_is_little_endian_float32(server):
    body = {"input": "one", "dimensions": 5}
    text = server.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    floats = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").tolist() == np.float32(floats).tolist()


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
