"""Hugging Face's own client, unmodified: each of its tasks that a server of this kind can do, by URL alone."""

from __future__ import annotations

import numpy as np
import pytest
from huggingface_hub import InferenceClient

TEXTS = ["the hybrid search", "one two three"]


@pytest.fixture
def of(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which forbids it this machine's own address too
    return lambda running: InferenceClient(running.url)


def test_feature_extraction(server, of):
    found = of(server).feature_extraction(TEXTS[0], normalize=False, truncate=True, truncation_direction="right")
    plain = server.post("/embed", {"inputs": TEXTS[0], "normalize": False}).json()
    np.testing.assert_array_equal(found, np.float32(plain))


def test_sentence_similarity(server, of):
    found = of(server).sentence_similarity("one", TEXTS)
    assert found == server.post("/similarity", {"inputs": {"source_sentence": "one", "sentences": TEXTS}}).json()


def test_text_classification(classifier, of):
    found = of(classifier).text_classification(TEXTS[0], top_k=2)
    plain = classifier.post("/predict", {"inputs": TEXTS[0]}).json()[:2]
    assert [(item.label, item.score) for item in found] == [(item["label"], item["score"]) for item in plain]


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_token_classification(tagger, of, strategy):
    found = of(tagger).token_classification("One two, three", aggregation_strategy=strategy)
    (plain,) = tagger.post("/predict_tokens", {"inputs": ["One two, three"], "aggregation_strategy": strategy}).json()
    assert [(item.word, item.start, item.end, {item.entity_group: item.score}) for item in found] == [
        (item["token"], item["start"], item["end"], item["results"]) for item in plain
    ]
