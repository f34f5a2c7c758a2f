"""LlamaIndex: its TEI embeddings and reranker, and its OpenAI-like embeddings."""

from __future__ import annotations

import asyncio

from harness import QUERY, TEXTS, Server, call, main, same
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference


@call
def tei_embeddings(server: Server) -> None:
    found = TextEmbeddingsInference(base_url=server.url, model_name=server.embed, auth_token="any")
    # More than its batch of ten
    many = [f"{one} {other}" for one in TEXTS for other in TEXTS]
    same(found.get_text_embedding_batch(many), server.vectors(many))
    same(found.get_query_embedding(TEXTS[0]), server.vectors([TEXTS[0]])[0])
    same(asyncio.run(found.aget_text_embedding(TEXTS[0])), server.vectors([TEXTS[0]])[0])


@call
def tei_reranker(server: Server) -> None:
    ranker = TextEmbeddingInference(base_url=server.url, top_n=3, auth_token="any")
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]
    found = ranker.postprocess_nodes(nodes, query_str=QUERY)
    wanted = server.ranks(return_text=True)[:3]
    same(
        [[node.text, node.score] for node in found],
        [[item["text"], item["score"]] for item in wanted],
    )


@call
def openai_like_embeddings(server: Server) -> None:
    found = OpenAILikeEmbedding(
        model_name=server.embed, api_base=f"{server.url}/v1", api_key="-", max_retries=0
    )
    same(found.get_text_embedding_batch(TEXTS), server.vectors())


main("llama-index (TEI, OpenAI-like)", "llama-index-core")
