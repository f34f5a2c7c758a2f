"""LangChain: Hugging Face's endpoint embeddings, as far as they take a URL, and OpenAI's."""

from __future__ import annotations

import asyncio
import os

from harness import TEXTS, Refused, Server, Skipped, call, main, refused, same
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings

# OpenAI's ids of these are high
RARE = "kubernetes Schrödinger 機械学習の検索エンジン"


def of_openai(server: Server, **settings: object) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="-", model=server.embed, max_retries=0, **settings
    )


@call
def hugging_face_endpoint(server: Server) -> None:
    found = HuggingFaceEndpointEmbeddings(model=server.url, huggingfacehub_api_token="-")
    same(found.embed_documents(TEXTS), server.vectors())
    same(found.embed_query(TEXTS[0]), server.vectors([TEXTS[0]])[0])
    same(asyncio.run(found.aembed_documents(TEXTS)), server.vectors())


@call
def hugging_face_endpoint_with_options(server: Server) -> None:
    found = HuggingFaceEndpointEmbeddings(
        model=f"{server.at(server.embed)}/embed",
        huggingfacehub_api_token="-",
        model_kwargs={"normalize": False},
    )
    same(found.embed_documents(TEXTS), server.vectors(normalize=False))


@call
def openai_with_plain_texts(server: Server) -> None:
    found = of_openai(server, check_embedding_ctx_length=False)
    same(found.embed_documents(TEXTS), server.vectors())
    same(found.embed_query(TEXTS[0]), server.vectors([TEXTS[0]])[0])


@call
def openai_with_dimensions(server: Server) -> None:
    found = of_openai(server, check_embedding_ctx_length=False, dimensions=8)
    same(found.embed_documents(TEXTS), server.vectors(dimensions=8))


@call
def openai_with_a_side_by_name(server: Server) -> None:
    for side in ("query", "document"):
        body = {"inputs": TEXTS, "outputs": ["dense"], "input_type": side}
        rows = server.ask("/embed_hybrid", body, alias=server.embed)
        found = OpenAIEmbeddings(
            base_url=f"{server.url}/v1",
            api_key="-",
            model=f"{server.embed}:{side}",
            max_retries=0,
            check_embedding_ctx_length=False,
        )
        same(found.embed_documents(TEXTS), [row["dense"] for row in rows])


@call
def openais_ids_are_refused_with_advice(server: Server) -> None:
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        raise Skipped("OpenAI's vocabulary is not at hand: it comes with LiteLLM's environment")
    try:
        server.ask("/v1/embeddings", {"input": [[100_000]]}, alias=server.embed)
    except Refused:
        refused(
            lambda: of_openai(server).embed_documents([RARE]),
            "UnprocessableEntity",
            "check_embedding_ctx_length=False",
        )
    else:
        raise Skipped(
            "this model's vocabulary is as large as OpenAI's: nothing tells its ids apart"
        )


main("langchain (huggingface 1.2.1, openai)", "langchain-openai")
