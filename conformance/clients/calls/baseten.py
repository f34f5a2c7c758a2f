"""Baseten's performance client: many concurrent small requests."""

from __future__ import annotations

from baseten_performance_client import PerformanceClient
from harness import QUERY, TEXTS, Server, call, main, pairs, same

MANY = [f"{one} {other}" for one in TEXTS for other in (*TEXTS, "beka", "doti", "dulu", "bami")]


def client(url: str) -> PerformanceClient:
    return PerformanceClient(url, "-")


@call
def embed_many(server: Server) -> None:
    answer = client(server.url).embed(MANY, model=server.embed)
    same([item.embedding for item in answer.data], server.vectors(MANY))
    assert [item.index for item in answer.data] == [*range(len(MANY))]
    assert answer.usage.total_tokens > len(MANY)


@call
def embed_with_dimensions(server: Server) -> None:
    same(
        [
            item.embedding
            for item in client(server.url).embed(TEXTS, model=server.embed, dimensions=8).data
        ],
        server.vectors(dimensions=8),
    )


@call
def rerank(server: Server) -> None:
    answer = client(server.url).rerank(QUERY, TEXTS, return_text=True, raw_scores=True)
    wanted = server.ranks(raw_scores=True, return_text=True)
    same(
        sorted(pairs(answer.data, "index", "score", "text")),
        sorted(pairs(wanted, "index", "score", "text")),
    )


@call
def rerank_without_texts(server: Server) -> None:
    answer = client(server.url).rerank(QUERY, TEXTS)
    wanted = pairs(server.ranks(), "index", "score")
    same(sorted(pairs(answer.data, "index", "score")), sorted(wanted))
    assert [item.text for item in answer.data] == [None] * len(TEXTS)


@call
def classify(server: Server) -> None:
    answer = client(server.url).classify(TEXTS)
    same(
        [pairs(group, "label", "score") for group in answer.data],
        [pairs(group, "label", "score") for group in server.labels()],
    )


@call
def batch_post_for_tags(server: Server) -> None:
    bodies = [
        {"inputs": [[text]], "truncate": True, "raw_scores": True, "aggregation_strategy": "none"}
        for text in TEXTS
    ]
    answer = client(server.url).batch_post("/predict_tokens", bodies)
    same(answer.data, [server.ask("/predict_tokens", body, alias=server.tag) for body in bodies])


@call
def batch_post_below_an_alias(server: Server) -> None:
    answer = client(server.at(server.embed)).batch_post(
        "/embed", [{"inputs": text} for text in TEXTS]
    )
    same(answer.data, [server.vectors(text) for text in TEXTS])


main("baseten-performance-client", "baseten-performance-client")
