"""LiteLLM, through each of its providers that can speak to such a server; its `baseten/` embeds
nothing (1.109.1)."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from harness import QUERY, TEXTS, Server, call, main, same

litellm.suppress_debug_info = True
litellm.telemetry = False


def embedded(model: str, url: str, **settings: Any) -> list[Any]:
    answer = litellm.embedding(model=model, input=TEXTS, api_base=url, api_key="-", **settings)
    return [item["embedding"] for item in answer.data]


def ranked(model: str, url: str, **settings: Any) -> list[list[Any]]:
    answer = litellm.rerank(
        model=model, query=QUERY, documents=TEXTS, api_base=url, api_key="-", **settings
    )
    return [
        [item["index"], item["relevance_score"], _text(item.get("document"))]
        for item in answer.results
    ]


# Providers that send what their users give and no more -> the end of the address that they take.
# fireworks_ai puts `fireworks/` before the model's name, so it asks a server of one model.
RANKERS = {
    "azure_ai": "",
    "cohere": "",
    "hosted_vllm": "",
    "huggingface": "",
    "jina_ai": "",
    "litellm_proxy": "",
    "scaleway": "/v1",
    "together_ai": "/v1",
    "voyage": "/v1",
}
EMBEDDERS = (
    "azure_ai",
    "hosted_vllm",
    "jina_ai",
    "litellm_proxy",
    "llamafile",
    "lm_studio",
    "mistral",
    "nvidia_nim",
    "openai",
    "openai_like",
    "openrouter",
    "together_ai",
    "voyage",
    "xinference",
)


def _text(document: Any) -> str | None:
    return document["text"] if isinstance(document, dict) else document


def wanted(server: Server, most: int | None = None, *, text: bool = True) -> list[list[Any]]:
    return [
        [item["index"], item["score"], item["text"] if text else None]
        for item in server.ranks(return_text=True)[:most]
    ]


@call
def rerank_with_the_defaults_of_each_provider(server: Server) -> None:
    for provider, end in RANKERS.items():
        found = ranked(f"{provider}/{server.rerank}", f"{server.url}{end}")
        same(found, wanted(server), provider)


@call
def embedding_with_the_defaults_of_each_provider(server: Server) -> None:
    for provider in EMBEDDERS:
        same(embedded(f"{provider}/{server.embed}", f"{server.url}/v1"), server.vectors(), provider)


@call
def huggingface_embedding(server: Server) -> None:
    same(
        embedded(
            f"huggingface/{server.embed}", f"{server.at(server.embed)}/embed", input_type="embed"
        ),
        server.vectors(),
    )
    same(embedded(f"huggingface/{server.embed}", server.url, input_type="embed"), server.vectors())


@call
def huggingface_similarity(server: Server) -> None:
    found = embedded(
        f"huggingface/{server.embed}", server.at(server.embed), input_type="similarity"
    )
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    same(found, server.ask("/similarity", body, alias=server.embed))


@call
def huggingface_rerank(server: Server) -> None:
    same(ranked(f"huggingface/{server.rerank}", server.url, top_n=len(TEXTS)), wanted(server))


@call
def infinity_embedding(server: Server) -> None:
    same(embedded(f"infinity/{server.embed}", server.url), server.vectors())
    same(
        embedded(f"infinity/{server.embed}", server.url, dimensions=8), server.vectors(dimensions=8)
    )


@call
def infinity_rerank(server: Server) -> None:
    """Its default asks for documents, and reads texts: that takes `--rerank-documents-as string`,
    since hosted_vllm sends the same request and reads objects."""
    same(
        ranked(f"infinity/{server.rerank}", server.url, top_n=2, return_documents=False),
        wanted(server, 2, text=False),
    )


@call
def hosted_vllm_embedding(server: Server) -> None:
    same(embedded(f"hosted_vllm/{server.embed}", f"{server.url}/v1"), server.vectors())


@call
def hosted_vllm_rerank(server: Server) -> None:
    same(ranked(f"hosted_vllm/{server.rerank}", server.url, return_documents=True), wanted(server))


@call
def openai_embedding(server: Server) -> None:
    same(embedded(f"openai/{server.embed}", f"{server.url}/v1"), server.vectors())
    same(
        embedded(f"openai/{server.embed}", f"{server.url}/v1", encoding_format="float"),
        server.vectors(),
    )


@call
def cohere_embedding(server: Server) -> None:
    same(
        embedded(f"cohere/{server.embed}", f"{server.url}/v2/embed", input_type="classification"),
        server.vectors(),
    )


@call
def cohere_embedding_version_1(server: Server) -> None:
    same(
        embedded(f"cohere/{server.embed}", f"{server.url}/v1/embed", input_type="classification"),
        server.vectors(),
    )


@call
def cohere_rerank(server: Server) -> None:
    same(
        ranked(f"cohere/{server.rerank}", server.url, top_n=2, return_documents=True),
        wanted(server, 2),
    )


@call
def jina_ai_embedding(server: Server) -> None:
    same(embedded(f"jina_ai/{server.embed}", f"{server.url}/v1"), server.vectors())


@call
def jina_ai_rerank(server: Server) -> None:
    same(ranked(f"jina_ai/{server.rerank}", server.url, return_documents=True), wanted(server))


@call
def voyage_embedding(server: Server) -> None:
    same(embedded(f"voyage/{server.embed}", f"{server.url}/v1"), server.vectors())
    same(
        embedded(f"voyage/{server.embed}", f"{server.url}/v1", dimensions=8),
        server.vectors(dimensions=8),
    )


@call
def voyage_rerank(server: Server) -> None:
    same(
        ranked(f"voyage/{server.rerank}", server.url, top_n=2, return_documents=True),
        wanted(server, 2),
    )


@call
def ollama_embedding(server: Server) -> None:
    same(embedded(f"ollama/{server.embed}", server.url), server.vectors())


main("litellm", "litellm")
