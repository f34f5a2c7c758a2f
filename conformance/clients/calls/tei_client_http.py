"""tei-client over HTTP: it asks /info first and refuses a model of another kind, so each kind has
its own base path."""

from __future__ import annotations

import asyncio

from harness import QUERY, TEXTS, Server, call, main, pairs, same
from tei_client import HttpClient


def client(server: Server, alias: str) -> HttpClient:
    return HttpClient(server.at(alias) + "/")


@call
def health_and_info(server: Server) -> None:
    asking = client(server, server.embed)
    assert asking.health()
    plain, info = server.ask("/info", alias=server.embed), asking.info()
    assert (info.server_model_id, info.max_input_length) == (
        plain["model_id"],
        plain["max_input_length"],
    )
    assert [
        client(server, alias).info().server_model_type.value
        for alias in (server.rerank, server.classify)
    ] == [
        "reranker",
        "classifier",
    ]


@call
def prompt_names(server: Server) -> None:
    wanted = [*server.ask("/info", alias=server.embed)["hybridtei"]["prompts"]]
    same(
        sorted(name for name in client(server, server.embed).prompt_names() if name), sorted(wanted)
    )


@call
def embed(server: Server) -> None:
    asking = client(server, server.embed)
    same(asking.embed(TEXTS), server.vectors())
    same(asking.embed(TEXTS[0], normalize=False), server.vectors([TEXTS[0]], normalize=False))
    same(asyncio.run(asking.async_embed(TEXTS)), server.vectors())


@call
def embed_ids(server: Server) -> None:
    asking = client(server, server.embed)
    (tokens,) = asking.tokenize(TEXTS[0])
    same(asking.embed(tokens.get_ids()), server.vectors([TEXTS[0]]))


@call
def embed_all(server: Server) -> None:
    same(
        client(server, server.embed).embed_all(TEXTS),
        server.ask("/embed_all", {"inputs": TEXTS}, alias=server.embed),
    )


@call
def tokenize_and_decode(server: Server) -> None:
    asking = client(server, server.embed)
    found = asking.tokenize(TEXTS)
    plain = server.ask("/tokenize", {"inputs": TEXTS}, alias=server.embed)
    fields = ("id", "text", "special", "start", "stop")
    same([pairs(one.tokens, *fields) for one in found], [pairs(one, *fields) for one in plain])
    same(asking.decode([one.get_ids() for one in found]), TEXTS)


@call
def classify(server: Server) -> None:
    asking = client(server, server.classify)
    wanted = [pairs(group, "label", "score") for group in server.labels()]
    same([pairs(group.scores, "label", "score") for group in asking.classify(TEXTS)], wanted)
    same([pairs(group.scores, "label", "score") for group in asking.classify(TEXTS[0])], wanted[:1])
    two = server.ask("/predict", {"inputs": [TEXTS[:2]]}, alias=server.classify)
    same(
        [pairs(group.scores, "label", "score") for group in asking.classify((TEXTS[0], TEXTS[1]))],
        [pairs(two[0], "label", "score")],
    )


@call
def rerank(server: Server) -> None:
    answer = client(server, server.rerank).rerank(QUERY, TEXTS, return_text=True, raw_scores=True)
    wanted = server.ranks(return_text=True, raw_scores=True)
    same(pairs(answer.ranks, "index", "score", "text"), pairs(wanted, "index", "score", "text"))


main("tei-client (HTTP)", "tei-client")
