"""Cohere's own client, unmodified: it reranks and embeds."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.server.live import Running

cohere = pytest.importorskip("cohere", reason="Cohere's client is not installed")

DOCUMENTS = ["the hybrid search", "one two three", "meaning by words"]


@pytest.fixture
def of(monkeypatch):
    """Its client of a server."""
    monkeypatch.delenv("CO_API_URL", raising=False)
    return lambda running, kind=cohere.ClientV2: kind(api_key="-", base_url=running.url, max_retries=0)


def ranks(running: Running, documents=DOCUMENTS):
    return [(item["index"], item["score"]) for item in running.post("/rerank", {"query": "one", "texts": documents}).json()]


def test_version_2_reranks(reranker, server, of):
    for running in (reranker, server):  # by a cross-encoder, and by vectors
        answer = of(running).rerank(model="any", query="one", documents=DOCUMENTS, top_n=2)
        assert [(item.index, np.float32(item.relevance_score)) for item in answer.results] == [
            (index, np.float32(score)) for index, score in ranks(running)[:2]
        ]
        assert answer.id
        assert answer.meta.billed_units.search_units == 1


def test_version_1_reranks_and_gives_documents_back(reranker, of):
    client = of(reranker, cohere.Client)
    answer = client.rerank(model="any", query="one", documents=[{"text": text} for text in DOCUMENTS], return_documents=True)
    assert [item.document.text for item in answer.results] == [DOCUMENTS[index] for index, _ in ranks(reranker)]
    fields = [{"title": "one", "text": "two", "by": "x"}, {"title": "three", "text": "four", "by": "y"}]
    named = client.rerank(model="any", query="one", documents=fields, rank_fields=["title", "text"])
    assert [item.index for item in named.results] == [index for index, _ in ranks(reranker, ["one\ntwo", "three\nfour"])]


def test_version_2_embeds_in_the_forms_it_asks_for(server, of):
    answer = of(server).embed(
        model="any",
        texts=DOCUMENTS,
        input_type="search_document",
        embedding_types=["float", "binary", "ubinary", "base64"],
        output_dimension=8,
    )
    body = {"inputs": DOCUMENTS, "dimensions": 8, "prompt_name": "passage"}
    dense = np.float32(server.post("/embed", body).json())
    np.testing.assert_array_equal(np.float32(answer.embeddings.float_), dense)
    bits = np.packbits(dense > 0, axis=1)
    np.testing.assert_array_equal(answer.embeddings.ubinary, bits)
    np.testing.assert_array_equal(answer.embeddings.binary, bits.astype(int) - 128)
    packed = [np.frombuffer(base64.b64decode(text), "<f4") for text in answer.embeddings.base64]
    np.testing.assert_array_equal(packed, dense)
    assert answer.embeddings.int8 is None


def test_version_1_embeds(server, of):
    client = of(server, cohere.Client)
    dense = np.float32(server.post("/embed", {"inputs": DOCUMENTS}).json())
    bare = client.embed(model="any", texts=DOCUMENTS)
    assert bare.response_type == "embeddings_floats"
    np.testing.assert_array_equal(np.float32(bare.embeddings), dense)
    named = client.embed(model="any", texts=DOCUMENTS, embedding_types=["float"], batching=False)
    np.testing.assert_array_equal(np.float32(named.embeddings.float_), dense)
    assert named.meta.api_version.version == "1"


def test_its_errors_say_what_is_wrong(dense_server, of):
    with pytest.raises(cohere.core.ApiError, match="model is not a re-ranker model"):
        of(dense_server).rerank(model="any", query="one", documents=DOCUMENTS)
