"""infinity's own client, unmodified: it embeds, reranks, classifies and lists models."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    infinity = pytest.importorskip("infinity_client", reason="infinity's client is not installed")
    pytest.importorskip("dateutil", reason="infinity's client needs python-dateutil")
    from infinity_client.api.default import classify, embeddings, models, rerank
    from infinity_client.models import (
        ClassifyInput,
        HTTPValidationError,
        OpenAIEmbeddingInputText,
        RerankInput,
    )

TEXTS = ["the hybrid search", "one two three"]


def client(running):
    return infinity.Client(base_url=running.url)


def test_it_embeds(server):
    answer = embeddings.sync(client=client(server), body=OpenAIEmbeddingInputText(input_=TEXTS))  # `dimensions` is 0
    plain = server.post("/embed", {"inputs": TEXTS}).json()
    np.testing.assert_array_equal(np.float32([item.embedding for item in answer.data]), np.float32(plain))


def test_it_reranks(reranker):
    answer = rerank.sync(client=client(reranker), body=RerankInput(query="one", documents=TEXTS, return_documents=True))
    plain = reranker.post("/rerank", {"query": "one", "texts": TEXTS}).json()
    assert [(item.index, item.document) for item in answer.results] == [(one["index"], TEXTS[one["index"]]) for one in plain]
    first = rerank.sync(client=client(reranker), body=RerankInput(query="one", documents=TEXTS, raw_scores=True, top_n=1))
    raw = reranker.post("/rerank", {"query": "one", "texts": TEXTS, "raw_scores": True}).json()
    assert [np.float32(item.relevance_score) for item in first.results] == [np.float32(raw[0]["score"])]


def test_it_classifies(classifier):
    answer = classify.sync(client=client(classifier), body=ClassifyInput(input_=TEXTS))
    plain = classifier.post("/predict", {"inputs": [[text] for text in TEXTS]}).json()
    assert [[(one.label, np.float32(one.score)) for one in group] for group in answer.data] == [
        [(one["label"], np.float32(one["score"])) for one in group] for group in plain
    ]


def test_it_lists_models(server):
    (item,) = models.sync(client=client(server)).data
    assert item.id == "small"
    assert item.backend == "fake"


def test_a_refusal_does_not_break_it(classifier):
    answer = classify.sync(client=client(classifier), body=ClassifyInput(input_=["x"] * 33))
    assert isinstance(answer, HTTPValidationError)
