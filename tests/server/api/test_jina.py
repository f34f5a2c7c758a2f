"""`/v1/embeddings` in Jina's words, and what it says to ids of a foreign vocabulary."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.engine import small

TEXTS = ["one two", "three"]


def vectors(server, **body):
    return [item["embedding"] for item in server.post("/v1/embeddings", {"input": TEXTS, **body}).json()["data"]]


def native(server, **body):
    return server.post("/embed", {"inputs": TEXTS, **body}).json()


def test_texts_may_be_wrapped(server):
    assert vectors(server, input=[{"text": text} for text in TEXTS], model="jina", late_chunking=False) == native(server)
    assert vectors(server, input=[TEXTS[0], {"text": TEXTS[1]}]) == native(server)


def test_normalized(server):
    assert vectors(server, normalized=False) == native(server, normalize=False) != native(server)
    assert vectors(server, normalized=True) == native(server)


@pytest.mark.parametrize("form", ["base64", ["base64"]])
def test_base64(server, form):
    unpacked = [np.frombuffer(base64.b64decode(text), "<f4") for text in vectors(server, embedding_type=form)]
    np.testing.assert_array_equal(unpacked, np.float32(native(server)))


def test_bits(server):
    bits = np.packbits(np.float32(native(server)) > 0, axis=1)
    np.testing.assert_array_equal(vectors(server, embedding_type="ubinary"), bits)
    np.testing.assert_array_equal(vectors(server, embedding_type=["binary"]), bits.astype(int) - 128)


def test_truncate(server):
    text = "one " * 1000
    refused = server.post("/v1/embeddings", {"input": text, "truncate": False})
    assert refused.status_code == 422
    assert vectors(server, input=[text], truncate=True) == native(server, inputs=[text], truncate=True)


@pytest.mark.parametrize(("task", "word"), [("retrieval.query", "query"), ("retrieval.passage", "document")])
def test_task_is_input_type(server, task, word):
    assert vectors(server, task=task) == vectors(server, input_type=word)
    assert vectors(server, task="text-matching") == vectors(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"late_chunking": True}, "`late_chunking` is true"),
        ({"embedding_type": ["float", "binary"]}, "`embedding_type` names 2 forms"),
        ({"embedding_type": "int2"}, "embedding_type"),
        ({"input": [{"image": "x"}]}, "input"),
    ],
)
def test_what_is_not_offered_is_refused(server, body, message):
    response = server.post("/v1/embeddings", {"input": TEXTS, **body})
    assert response.status_code == 422
    assert message in response.text


@pytest.mark.parametrize("given", [[[9906, 1917]], [9906, 1917], ["one", [9906]]])
def test_ids_of_a_foreign_vocabulary_are_refused_with_advice(server, given):
    response = server.post("/v1/embeddings", {"input": given})
    assert response.status_code == 422
    message = response.json()["message"]
    assert f"holds the id {9906}, but the vocabulary ends at" in message
    assert "check_embedding_ctx_length=False" in message


def test_the_last_id_of_the_vocabulary_is_none_of_them(server):
    last = max(small.IDS.values())
    of_ours, foreign = (server.post("/v1/embeddings", {"input": [[small.IDS["one"], i]]}) for i in (last, last + 1))
    assert of_ours.status_code == 200
    assert f"holds the id {last + 1}, but the vocabulary ends at {last}." in foreign.json()["message"]
