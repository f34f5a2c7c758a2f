"""Baseten's performance client, unmodified: it embeds, reranks, classifies and tags, over JSON, MessagePack and zstd."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server.live import Running

baseten = pytest.importorskip("baseten_performance_client", reason="Baseten's client is not installed")

TEXTS = [f"one two {word}" for word in ("three", "four", "five", "hybrid", "search", "engine", "the", "a", "by", "words")]


def client(running: Running):
    return baseten.PerformanceClient(running.url, "-")


def test_it_embeds_many_texts(server):
    answer = client(server).embed(TEXTS, model="any")
    plain = server.post("/embed", {"inputs": TEXTS}).json()
    np.testing.assert_array_equal(np.float32([item.embedding for item in answer.data]), np.float32(plain))
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("return_text", [False, True])
def test_it_reranks(reranker, return_text):
    answer = client(reranker).rerank("one", TEXTS[:8], return_text=return_text)
    plain = reranker.post("/rerank", {"query": "one", "texts": TEXTS[:8]}).json()
    # The client sorts what it gathers, so equal scores may change places.
    assert {item.index: np.float32(item.score) for item in answer.data} == {
        item["index"]: np.float32(item["score"]) for item in plain
    }
    assert [item.text for item in answer.data] == [TEXTS[item.index] if return_text else None for item in answer.data]


def test_it_classifies(classifier):
    answer = client(classifier).classify(TEXTS)
    plain = classifier.post("/predict", {"inputs": [[text] for text in TEXTS]}).json()
    assert [[(one.label, np.float32(one.score)) for one in group] for group in answer.data] == [
        [(one["label"], np.float32(one["score"])) for one in group] for group in plain
    ]


def test_it_tags(tagger):
    body = {"inputs": [["one two"], ["three"]], "truncate": True, "raw_scores": False, "aggregation_strategy": "none"}
    answer = client(tagger).batch_post("/predict_tokens", [body])
    assert answer.data[0] == tagger.post("/predict_tokens", body).json()
