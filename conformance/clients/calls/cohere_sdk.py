"""Cohere's SDK, both of its versions."""

from __future__ import annotations

import base64
import struct

import cohere
from harness import QUERY, TEXTS, Server, bits, call, main, pairs, refused, same


def v2(server: Server) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="-", base_url=server.url, max_retries=0)


def v1(server: Server) -> cohere.Client:
    return cohere.Client(api_key="-", base_url=server.url, max_retries=0)


@call
def rerank_v2(server: Server) -> None:
    answer = v2(server).rerank(model=server.rerank, query=QUERY, documents=TEXTS, top_n=2)
    same(
        pairs(answer.results, "index", "relevance_score"),
        pairs(server.ranks()[:2], "index", "score"),
    )
    assert answer.id
    assert answer.meta.billed_units.search_units == 1


@call
def rerank_v2_by_vectors(server: Server) -> None:
    answer = v2(server).rerank(model=server.embed, query=QUERY, documents=TEXTS)
    wanted = server.ask("/rerank", {"query": QUERY, "texts": TEXTS}, alias=server.embed)
    for item in wanted:
        distance = item["score"] - 0.5
        item["score"] = 0.5 + 2 * distance / (1 + 4 * abs(distance))
    same(pairs(answer.results, "index", "relevance_score"), pairs(wanted, "index", "score"))


@call
def rerank_v1_with_documents(server: Server) -> None:
    documents = [{"text": text, "title": "x"} for text in TEXTS]
    answer = v1(server).rerank(
        model=server.rerank, query=QUERY, documents=documents, return_documents=True
    )
    wanted = server.ranks(return_text=True)
    same(pairs(answer.results, "index", "relevance_score"), pairs(wanted, "index", "score"))
    assert [item.document.text for item in answer.results] == [item["text"] for item in wanted]


@call
def rerank_v1_with_rank_fields(server: Server) -> None:
    documents = [{"title": "beti", "text": text} for text in TEXTS]
    answer = v1(server).rerank(
        model=server.rerank, query=QUERY, documents=documents, rank_fields=["title", "text"]
    )
    wanted = server.ranks([f"beti\n{text}" for text in TEXTS])
    same(pairs(answer.results, "index", "relevance_score"), pairs(wanted, "index", "score"))


@call
def embed_v2_in_four_forms(server: Server) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = v2(server).embed(
        model=server.embed,
        texts=TEXTS,
        input_type="classification",
        embedding_types=kinds,
        output_dimension=8,
    )
    wanted = server.vectors(dimensions=8)
    same(answer.embeddings.float_, wanted)
    same(
        [[*struct.unpack("<8f", base64.b64decode(text))] for text in answer.embeddings.base64],
        wanted,
    )
    packed = [[bits(row)] for row in wanted]
    same(answer.embeddings.ubinary, packed)
    same(answer.embeddings.binary, [[byte - 128] for (byte,) in packed])
    assert answer.embeddings.int8 is None
    assert answer.texts == TEXTS


@call
def embed_v2_of_documents_with_their_prompt(server: Server) -> None:
    answer = v2(server).embed(
        model=server.embed, texts=TEXTS, input_type="search_document", embedding_types=["float"]
    )
    prompts = server.ask("/info", alias=server.embed)["hybridtei"]["prompts"]
    same(
        answer.embeddings.float_,
        server.vectors(prompt_name="passage" if "passage" in prompts else None),
    )


@call
def embed_v2_of_inputs(server: Server) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = v2(server).embed(
        model=server.embed, inputs=inputs, input_type="classification", embedding_types=["float"]
    )
    same(answer.embeddings.float_, server.vectors())


@call
def embed_v1_as_a_bare_list(server: Server) -> None:
    answer = v1(server).embed(model=server.embed, texts=TEXTS, input_type="classification")
    assert answer.response_type == "embeddings_floats"
    same(answer.embeddings, server.vectors())


@call
def embed_v1_by_type(server: Server) -> None:
    answer = v1(server).embed(
        model=server.embed, texts=TEXTS, input_type="classification", embedding_types=["float"]
    )
    same(answer.embeddings.float_, server.vectors())
    assert answer.meta.api_version.version == "1"


@call
def errors_are_read(server: Server) -> None:
    refused(
        lambda: v2(server).rerank(model=server.classify, query=QUERY, documents=TEXTS),
        "model is not a re-ranker model",
    )
    refused(
        lambda: v2(server).rerank(model="nobody", query=QUERY, documents=TEXTS),
        "NotFoundError",
        "is not served here",
    )


main("cohere", "cohere")
