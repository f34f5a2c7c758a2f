"""Voyage's own client, unmodified: it reranks, and embeds in every form it knows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hybridtei.server.vectors import ranges_in
from hybridtei.tasks.quantize import quantized, ranges_of
from tests.engine import small
from tests.server.live import serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    voyageai = pytest.importorskip("voyageai", reason="Voyage's client is not installed")

TEXTS = ["the hybrid search", "one two three"]


def client(running):
    return voyageai.Client(api_key="-", base_url=f"{running.url}/v1")


def test_it_reranks(reranker):
    answer = client(reranker).rerank("one", TEXTS, model="any", top_k=1)
    (best,) = reranker.post("/rerank", {"query": "one", "texts": TEXTS}).json()[:1]
    assert [(item.index, item.document) for item in answer.results] == [(best["index"], TEXTS[best["index"]])]
    assert np.float32(answer.results[0].relevance_score) == np.float32(best["score"])
    assert answer.total_tokens > 0


@pytest.mark.parametrize("dtype", [None, "float", "int8", "uint8", "binary", "ubinary"])
def test_it_embeds(dtype, tmp_path):
    dense = np.random.default_rng(0).uniform(-0.4, 0.4, (64, small.HIDDEN)).astype(np.float32)
    np.save(tmp_path / "ranges.npy", ranges_of(dense))
    ranges = ranges_in(str(tmp_path / "ranges.npy"))["dense"]
    with serving(model={"quantization_ranges": str(tmp_path / "ranges.npy")}) as running:
        answer = client(running).embed(TEXTS, model="any", input_type="query", output_dtype=dtype)
        plain = np.float32(running.post("/embed", {"inputs": [f"query: {text}" for text in TEXTS]}).json())
    np.testing.assert_array_equal(answer.embeddings, quantized(plain, dtype or "float", ranges))


@pytest.mark.parametrize("dtype", [None, "ubinary"])
def test_it_embeds_chunks_in_their_documents(server, dtype):
    documents = [["one two", "three", "four five"], ["the hybrid search"]]
    answer = client(server).contextualized_embed(documents, model="any", output_dtype=dtype, output_dimension=8)
    inputs = [
        {"text": "one two three four five", "spans": [[0, 7], [8, 13], [14, 23]]},
        {"text": documents[1][0], "spans": [[0, len(documents[1][0])]]},
    ]
    body = {"inputs": inputs, "outputs": ["dense"], "dimensions": 8}
    rows = server.post("/embed_hybrid", {**body, "output_dtype": dtype or "float"}).json()
    for found, wanted in zip(answer.results, rows, strict=True):
        np.testing.assert_array_equal(np.float32(found.embeddings), np.float32([one["dense"] for one in wanted]))
    assert answer.total_tokens == 7 + 5
    queries = client(server).contextualized_embed([["one"], ["two"]], model="any", input_type="query")
    spans = [{"text": f"query: {text}", "spans": [[7, 10]]} for text in ("one", "two")]
    rows = server.post("/embed_hybrid", {"inputs": spans, "outputs": ["dense"]}).json()
    np.testing.assert_array_equal(
        np.float32([one.embeddings for one in queries.results]), np.float32([[row[0]["dense"]] for row in rows])
    )


@pytest.mark.parametrize(
    ("inputs", "more", "status", "words"),
    [
        ([["one"], ["two", " "]], {}, 422, "`inputs[1][1]` is [3, 4], which holds no token"),
        ([["one"], [""]], {}, 400, "`inputs[1]` cannot be empty"),
        ([["one"], []], {}, 422, "length >= 1"),
        ([["one"]], {"enable_auto_chunking": True}, 422, "`enable_auto_chunking` is true"),
        ([["one"] * 8001] * 2, {}, 422, "`inputs` holds 16002 chunks > maximum allowed 16000"),
        ([["one"]] * 33, {}, 422, "batch size 33 > maximum allowed batch size 32"),
    ],
)
def test_chunks_that_cannot_be(server, inputs, more, status, words):
    response = server.post("/v1/contextualizedembeddings", {"inputs": inputs, **more})
    assert (response.status_code, words in response.text) == (status, True), response.text


def test_models_without_a_mean_are_refused_by_name():
    with serving(small.model_spec(pooling=("cls",))) as running:
        for path, body in (
            ("/v1/contextualizedembeddings", {"inputs": [TEXTS]}),
            ("/v1/embeddings", {"input": TEXTS, "late_chunking": True}),
        ):
            response = running.post(path, body)
            assert (response.status_code, "the model pools by cls" in response.text) == (424, True), response.text


def test_it_cuts(server):
    answer = client(server).embed(TEXTS, model="any", output_dimension=4)
    plain = server.post("/embed", {"inputs": TEXTS, "dimensions": 4}).json()
    np.testing.assert_array_equal(np.float32(answer.embeddings), np.float32(plain))
