"""Software that is no Python package, or too large to install: requests as its source sends them,
answers as it reads them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from harness import QUERY, TEXTS, TOLERANCE, Server, call, main, pairs, refused, same


@call
def what_is_compared_differs_from_text_to_text(server: Server) -> None:
    """Otherwise no comparison with it means anything."""
    for row, other in combinations(server.vectors(), 2):
        assert max(abs(a - b) for a, b in zip(row, other, strict=True)) > 1000 * TOLERANCE, (
            "two vectors are the same"
        )
    for scores in (
        [item["score"] for item in server.ranks()],
        [max(i["score"] for i in one) for one in server.labels()],
    ):
        for one, other in combinations(scores, 2):
            assert abs(one - other) > 10 * TOLERANCE, f"two scores are the same: {scores}"


@call
def open_webui_engine_openai(server: Server) -> None:
    answer = server.ask(
        "/v1/embeddings", {"input": TEXTS, "model": server.embed, "prefix": "query"}
    )
    same([item["embedding"] for item in answer["data"]], server.vectors())


@call
def open_webui_engine_ollama(server: Server) -> None:
    answer = server.ask("/api/embed", {"input": TEXTS, "model": server.embed, "truncate": True})
    same(answer["embeddings"], server.vectors())


@call
def open_webui_external_reranker(server: Server) -> None:
    for path in ("/v1/rerank", "/rerank"):
        body = {"model": server.rerank, "query": QUERY, "documents": TEXTS, "top_n": len(TEXTS)}
        found = sorted(server.ask(path, body)["results"], key=lambda item: item["index"])
        same(
            pairs(found, "index", "relevance_score"),
            sorted(pairs(server.ranks(), "index", "score")),
        )


@call
def dify_tei_embedding(server: Server) -> None:
    info = server.ask("/info", alias=server.embed)
    assert next(iter(info["model_type"])) == "embedding"
    assert info["max_input_length"] > 0 < info["max_client_batch_size"]
    answer = server.ask("/v1/embeddings", {"input": TEXTS}, alias=server.embed)
    same([item["embedding"] for item in answer["data"]], server.vectors())
    assert answer["usage"]["total_tokens"] > 0


@call
def dify_tei_rerank(server: Server) -> None:
    assert next(iter(server.ask("/info", alias=server.rerank)["model_type"])) == "reranker"
    answer = server.ask(
        "/rerank", {"query": QUERY, "texts": TEXTS[:3], "return_text": True}, alias=server.rerank
    )
    same(answer, server.ranks(TEXTS[:3], return_text=True))
    assert all(item["text"] == TEXTS[item["index"]] for item in answer)


@call
def dify_openai_compatible_rerank(server: Server) -> None:
    body = {"model": server.rerank, "query": QUERY, "documents": TEXTS, "top_n": 2}
    found = server.ask("/v1/rerank", body)["results"]
    same(pairs(found, "index", "relevance_score"), pairs(server.ranks()[:2], "index", "score"))


@call
def chroma_embedding_server(server: Server) -> None:
    same(server.ask("/embed", {"inputs": TEXTS}), server.vectors())


@call
def milvus_embedding(server: Server) -> None:
    body = {"inputs": TEXTS, "truncate": True, "truncation_direction": "Left"}
    same(server.ask("/embed", body, headers={"Authorization": "Bearer any"}), server.vectors())


@call
def milvus_rerank(server: Server) -> None:
    body = {"query": QUERY, "texts": TEXTS, "truncate": True, "truncation_direction": "Right"}
    same(server.ask("/rerank", body), server.ranks())


@call
def milvus_vllm_rerank(server: Server) -> None:
    found = server.ask("/v2/rerank", {"query": QUERY, "documents": TEXTS})["results"]
    same(pairs(found, "index", "relevance_score"), pairs(server.ranks(), "index", "score"))


@call
def weaviate_text2vec_huggingface(server: Server) -> None:
    options = {"wait_for_model": True, "use_gpu": False, "use_cache": False}
    for path in ("/", "/embed"):
        same(server.ask(path, {"inputs": TEXTS, "options": options}), server.vectors())
    _says("error", lambda: server.ask("/", {"inputs": [""], "options": options}))


@call
def weaviate_reranker_transformers(server: Server) -> None:
    answer = server.ask("/rerank", {"query": QUERY, "documents": TEXTS, "property": ""})
    assert answer["query"] == QUERY
    by_place = sorted(server.ranks(return_text=True), key=lambda item: item["index"])
    same(
        answer["scores"], [{"document": item["text"], "score": item["score"]} for item in by_place]
    )


@call
def weaviate_text2vec_openai(server: Server) -> None:
    answer = server.ask("/v1/embeddings", {"input": TEXTS, "model": server.embed, "dimensions": 8})
    same([item["embedding"] for item in answer["data"]], server.vectors(dimensions=8))


@call
def vespa_openai_embedder(server: Server) -> None:
    body = {"model": server.embed, "input": TEXTS[0], "encoding_format": "float", "dimensions": 8}
    (item,) = server.ask("/v1/embeddings", body)["data"]
    same(item["embedding"], server.vectors([TEXTS[0]], dimensions=8)[0])
    refused(lambda: server.ask("/v1/embeddings", {**body, "input": ""}), "400")


@call
def jina_embeddings(server: Server) -> None:
    asked = {
        "model": server.embed,
        "task": "text-matching",
        "late_chunking": False,
        "truncate": True,
    }
    wrapped = [{"text": text} for text in TEXTS]
    answer = server.ask(
        "/v1/embeddings", {**asked, "input": wrapped, "embedding_type": "float", "normalized": True}
    )
    same([item["embedding"] for item in answer["data"]], server.vectors())
    raw = server.ask(
        "/v1/embeddings", {**asked, "input": TEXTS, "normalized": False, "dimensions": 8}
    )
    same([item["embedding"] for item in raw["data"]], server.vectors(normalize=False, dimensions=8))


@call
def jina_rerank(server: Server) -> None:
    body = {
        "model": server.rerank,
        "query": QUERY,
        "documents": TEXTS,
        "top_n": 2,
        "return_documents": True,
    }
    answer = server.ask("/v1/rerank", body)
    wanted = server.ranks(return_text=True)[:2]
    same(pairs(answer["results"], "index", "relevance_score"), pairs(wanted, "index", "score"))
    assert [item["document"]["text"] for item in answer["results"]] == [
        item["text"] for item in wanted
    ]
    assert answer["usage"]["total_tokens"] > 0
    _says("detail", lambda: server.ask("/v1/rerank", {**body, "documents": []}))


@call
def vllm_classify_and_score(server: Server) -> None:
    answer = server.ask("/v1/classify", {"input": TEXTS, "model": server.classify})
    best = [group[0] for group in server.labels()]
    same(
        [[item["label"], max(item["probs"])] for item in answer["data"]],
        [[item["label"], item["score"]] for item in best],
    )
    scores = server.ask("/v1/score", {"model": server.rerank, "text_1": QUERY, "text_2": TEXTS})[
        "data"
    ]
    by_place = sorted(server.ranks(), key=lambda item: item["index"])
    same(pairs(scores, "index", "score"), pairs(by_place, "index", "score"))


def _says(word: str, work: Any) -> None:
    """Raises AssertionError unless `work` is refused, and the refusal has this key."""
    refused(work, f'"{word}"')


main("by plain HTTP", None)
