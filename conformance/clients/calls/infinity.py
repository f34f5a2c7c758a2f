"""infinity's own client."""

from __future__ import annotations

import warnings

from harness import QUERY, TEXTS, Server, call, main, pairs, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import infinity_client
    from infinity_client.api.default import classify, embeddings, models, rerank
    from infinity_client.models import (
        ClassifyInput,
        HTTPValidationError,
        OpenAIEmbeddingInputText,
        RerankInput,
    )


def client(server: Server) -> infinity_client.Client:
    return infinity_client.Client(base_url=server.url)


@call
def embeddings_of_an_unnamed_model(server: Server) -> None:
    # Its `dimensions` is 0
    answer = embeddings.sync(client=client(server), body=OpenAIEmbeddingInputText(input_=TEXTS))
    same([item.embedding for item in answer.data], server.vectors())


@call
def embeddings_with_dimensions(server: Server) -> None:
    body = OpenAIEmbeddingInputText(input_=TEXTS, model=server.embed, dimensions=8)
    same(
        [item.embedding for item in embeddings.sync(client=client(server), body=body).data],
        server.vectors(dimensions=8),
    )


@call
def rerank_with_documents(server: Server) -> None:
    answer = rerank.sync(
        client=client(server), body=RerankInput(query=QUERY, documents=TEXTS, return_documents=True)
    )
    wanted = server.ranks(return_text=True)
    same(
        pairs(answer.results, "index", "relevance_score", "document"),
        pairs(wanted, "index", "score", "text"),
    )


@call
def rerank_raw_with_top_n(server: Server) -> None:
    body = RerankInput(query=QUERY, documents=TEXTS, raw_scores=True, top_n=1, model=server.rerank)
    answer = rerank.sync(client=client(server), body=body)
    same(
        pairs(answer.results, "index", "relevance_score"),
        pairs(server.ranks(raw_scores=True)[:1], "index", "score"),
    )


@call
def classify_texts(server: Server) -> None:
    answer = classify.sync(
        client=client(server), body=ClassifyInput(input_=TEXTS, model=server.classify)
    )
    same(
        [pairs(group, "label", "score") for group in answer.data],
        [pairs(group, "label", "score") for group in server.labels()],
    )


@call
def models_with_stats(server: Server) -> None:
    found = models.sync(client=client(server)).data
    assert {server.embed, server.rerank} <= {item.id for item in found}
    assert all(item.backend for item in found)


@call
def a_refusal_is_parsed(server: Server) -> None:
    answer = classify.sync(client=client(server), body=ClassifyInput(input_=["x"] * 4000))
    assert isinstance(answer, HTTPValidationError), answer


main("infinity_client", "infinity-client")
