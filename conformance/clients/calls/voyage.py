"""Voyage's SDK."""

from __future__ import annotations

import warnings

from harness import QUERY, TEXTS, Server, call, main, pairs, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import voyageai


def client(server: Server) -> voyageai.Client:
    return voyageai.Client(api_key="-", base_url=f"{server.url}/v1", max_retries=0)


@call
def embed(server: Server) -> None:
    answer = client(server).embed(TEXTS, model=server.embed)
    same(answer.embeddings, server.vectors())
    assert answer.total_tokens > 0


@call
def embed_with_output_dimension(server: Server) -> None:
    same(client(server).embed(TEXTS, model=server.embed, output_dimension=8).embeddings, server.vectors(dimensions=8))


@call
def embed_as_bits(server: Server) -> None:
    found = client(server).embed(TEXTS, model=server.embed, output_dtype="ubinary").embeddings
    same(found, [[_byte(row[at : at + 8]) for at in range(0, len(row), 8)] for row in server.vectors()])


def _byte(numbers: list[float]) -> int:
    return int("".join("1" if number > 0 else "0" for number in numbers), 2)


@call
def contextualized_embed(server: Server) -> None:
    (document,) = client(server).contextualized_embed([TEXTS], model=server.embed).results
    (alone,) = client(server).contextualized_embed([TEXTS[:1]], model=server.embed).results
    assert len(document.embeddings) == len(TEXTS)
    assert document.embeddings[0] != alone.embeddings[0]


@call
def rerank_with_top_k(server: Server) -> None:
    answer = client(server).rerank(QUERY, TEXTS, model=server.rerank, top_k=2)
    wanted = server.ranks(return_text=True)[:2]
    same(pairs(answer.results, "index", "relevance_score", "document"), pairs(wanted, "index", "score", "text"))
    assert answer.total_tokens > 0


main("voyageai", "voyageai")
