"""Haystack's components for TEI, over HTTP and, where there is a server, over gRPC by its
reflection."""

from __future__ import annotations

import os
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from harness import QUERY, TEXTS, Server, Skipped, call, main, same
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
    HuggingFaceTEISparseDocumentEmbedder,
    HuggingFaceTEISparseTextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import (
    HuggingFaceTEIRanker,
    TruncationDirection,
)

KEY = Secret.from_token("-")


def dense(kind: Any, url: str, **settings: Any) -> Any:
    return kind(
        api_type="text_embeddings_inference", api_params={"url": url}, token=KEY, **settings
    )


def documents() -> list[Document]:
    return [Document(content=text) for text in TEXTS]


def sparse(server: Server, texts: list[str]) -> list[list[list[float]]]:
    rows = server.ask("/embed_sparse", {"inputs": texts}, alias=server.embed)
    return [[[item["index"] for item in row], [item["value"] for item in row]] for row in rows]


def target(server: Server, alias: str) -> str:
    if alias not in server.grpc:
        raise Skipped(f"no gRPC server of {alias}")
    return server.grpc[alias]


@call
def text_embedder_does_not_normalise_unless_asked(server: Server) -> None:
    found = dense(HuggingFaceAPITextEmbedder, server.url).run(TEXTS[0])["embedding"]
    same(found, server.vectors([TEXTS[0]], normalize=False)[0])
    found = dense(HuggingFaceAPITextEmbedder, server.url, normalize=True).run(TEXTS[0])["embedding"]
    same(found, server.vectors([TEXTS[0]])[0])


@call
def document_embedder(server: Server) -> None:
    found = dense(
        HuggingFaceAPIDocumentEmbedder, server.url, normalize=True, progress_bar=False
    ).run(documents())
    same([one.embedding for one in found["documents"]], server.vectors())


@call
def sparse_text_embedder(server: Server) -> None:
    found = HuggingFaceTEISparseTextEmbedder(api_base_url=server.url, token=KEY).run(TEXTS[0])[
        "sparse_embedding"
    ]
    same([found.indices, found.values], sparse(server, [TEXTS[0]])[0])


@call
def sparse_document_embedder(server: Server) -> None:
    asking = HuggingFaceTEISparseDocumentEmbedder(
        api_base_url=server.url, token=KEY, progress_bar=False
    )
    found = [one.sparse_embedding for one in asking.run(documents())["documents"]]
    same([[one.indices, one.values] for one in found], sparse(server, TEXTS))


@call
def ranker(server: Server) -> None:
    found = HuggingFaceTEIRanker(url=server.url, top_k=3, raw_scores=True, token=KEY).run(
        query=QUERY, documents=documents(), truncation_direction=TruncationDirection.LEFT
    )["documents"]
    wanted = server.ranks(raw_scores=True, return_text=True)[:3]
    same(
        [[one.content, one.score] for one in found],
        [[item["text"], item["score"]] for item in wanted],
    )


@call
def text_embedder_over_grpc(server: Server) -> None:
    found = dense(
        HuggingFaceAPITextEmbedder, target(server, server.embed), use_grpc=True, normalize=False
    )
    same(found.run(TEXTS[0])["embedding"], server.vectors([TEXTS[0]], normalize=False)[0])


@call
def document_embedder_over_grpc(server: Server) -> None:
    asking = dense(
        HuggingFaceAPIDocumentEmbedder,
        target(server, server.embed),
        use_grpc=True,
        normalize=True,
        progress_bar=False,
    )
    same([one.embedding for one in asking.run(documents())["documents"]], server.vectors())


@call
def sparse_text_embedder_over_grpc(server: Server) -> None:
    asking = HuggingFaceTEISparseTextEmbedder(
        api_base_url=target(server, server.embed), token=KEY, use_grpc=True
    )
    found = asking.run(TEXTS[0])["sparse_embedding"]
    same([found.indices, found.values], sparse(server, [TEXTS[0]])[0])


@call
def ranker_over_grpc(server: Server) -> None:
    asking = HuggingFaceTEIRanker(
        url=target(server, server.rerank), top_k=3, token=KEY, use_grpc=True
    )
    found = asking.run(query=QUERY, documents=documents())["documents"]
    wanted = server.ranks(return_text=True)[:3]
    same(
        [[one.content, one.score] for one in found],
        [[item["text"], item["score"]] for item in wanted],
    )


main("haystack (huggingface-api-haystack)", "huggingface-api-haystack")
