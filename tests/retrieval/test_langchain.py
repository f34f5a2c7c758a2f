"""The sparse object in LangChain's own store, fed by an encoder and by a running server."""

import pytest
from qdrant_client import QdrantClient, models

from hybridtei.client import Client
from hybridtei.errors import EmptyInput, NoAnswer
from hybridtei.retrieval.langchain import HybridSparseEmbeddings
from tests.retrieval.search.small_search import TEXTS, exact, run
from tests.server.live import serving

langchain_qdrant = pytest.importorskip("langchain_qdrant")


def langchain_store(client, name, encoder):
    """LangChain's store of a collection."""
    return langchain_qdrant.QdrantVectorStore(
        client,
        name,
        sparse_embedding=HybridSparseEmbeddings(encoder),
        retrieval_mode=langchain_qdrant.RetrievalMode.SPARSE,
        sparse_vector_name="sparse",
        content_payload_key="text",
    )


def test_the_store_searches_by_it(encoder):
    client = QdrantClient(":memory:")
    client.create_collection(
        "papers", sparse_vectors_config={"sparse": models.SparseVectorParams()}
    )
    store = langchain_store(client, "papers", encoder)
    store.add_texts(TEXTS, [{"place": i} for i in range(len(TEXTS))])
    query = " ".join(TEXTS)
    scores = exact(encoder, query)["sparse"]
    found = store.similarity_search_with_score(query, k=3)
    assert [score for _, score in found] == pytest.approx(
        [one for one in sorted(scores, reverse=True)[:3] if one > 0], rel=1e-5
    )
    assert scores[found[0][0].metadata["place"]] == pytest.approx(scores.max())
    client.close()


def test_a_server_gives_what_an_encoder_gives(encoder):
    here = HybridSparseEmbeddings(encoder)
    with serving() as server:
        there = HybridSparseEmbeddings(server.url)
        other = HybridSparseEmbeddings(Client(server.url, patience_s=0.2), query_prompt="passage")
        assert there.embed_query("one two") == here.embed_query("one two")
        assert other.embed_query("one two") != here.embed_query("one two")
        assert len(other.embed_documents(TEXTS * 4)) == 4 * len(TEXTS)
        assert run(there.aembed_query("one two")) == there.embed_query("one two")
        assert run(here.aembed_documents(TEXTS)) == here.embed_documents(TEXTS)
        assert isinstance(here.embed_query("one"), langchain_qdrant.sparse_embeddings.SparseVector)
        with pytest.raises(EmptyInput, match="status 4"):
            there.embed_query("")
        there.close()
    with pytest.raises(NoAnswer, match="ConnectError"):
        other.embed_query("one")
    other._source.close()
