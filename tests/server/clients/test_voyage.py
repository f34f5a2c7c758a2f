"""Voyage's own client, unmodified: it reranks, and embeds in every form it knows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hybridtei.server.vectors import ranges_in
from hybridtei.tasks.embed import quantized, ranges_of
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


def test_it_cuts(server):
    answer = client(server).embed(TEXTS, model="any", output_dimension=4)
    plain = server.post("/embed", {"inputs": TEXTS, "dimensions": 4}).json()
    np.testing.assert_array_equal(np.float32(answer.embeddings), np.float32(plain))
