"""Voyage's SDK."""

from __future__ import annotations

import warnings

from harness import QUERY, TEXTS, Refused, Server, Skipped, bits, call, main, pairs, refused, same

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
    same(
        client(server).embed(TEXTS, model=server.embed, output_dimension=8).embeddings,
        server.vectors(dimensions=8),
    )


@call
def embed_queries(server: Server) -> None:
    prompts = server.ask("/info", alias=server.embed)["hybridtei"]["prompts"]
    wanted = server.vectors(prompt_name="query" if "query" in prompts else None)
    for dtype in (None, "float"):
        answer = client(server).embed(
            TEXTS, model=server.embed, input_type="query", output_dtype=dtype
        )
        same(answer.embeddings, wanted)


@call
def embed_as_bits(server: Server) -> None:
    packed = [[bits(row[at : at + 8]) for at in range(0, len(row), 8)] for row in server.vectors()]
    same(client(server).embed(TEXTS, model=server.embed, output_dtype="ubinary").embeddings, packed)
    signed = [[byte - 128 for byte in row] for row in packed]
    same(client(server).embed(TEXTS, model=server.embed, output_dtype="binary").embeddings, signed)


@call
def embed_as_bytes(server: Server) -> None:
    for dtype in ("int8", "uint8"):
        body = {"inputs": TEXTS, "outputs": ["dense"], "output_dtype": dtype}
        try:
            wanted = server.ask("/embed_hybrid", body, alias=server.embed)
        except Refused as error:
            raise Skipped(f"a model without quantization ranges: {error}") from None
        found = client(server).embed(TEXTS, model=server.embed, output_dtype=dtype).embeddings
        same(found, [row["dense"] for row in wanted])


@call
def contextualized_embed(server: Server) -> None:
    """Chunks are spans of their document, joined by spaces."""
    ends = [sum(map(len, TEXTS[: place + 1])) + place for place in range(len(TEXTS))]
    spans = [[end - len(text), end] for end, text in zip(ends, TEXTS, strict=True)]
    documents = [
        {"text": " ".join(TEXTS), "spans": spans},
        {"text": TEXTS[0], "spans": [[0, len(TEXTS[0])]]},
    ]
    for dtype in ("float", "ubinary"):
        body = {"inputs": documents, "outputs": ["dense"], "dimensions": 8, "output_dtype": dtype}
        wanted = server.ask("/embed_hybrid", body, alias=server.embed)
        answer = client(server).contextualized_embed(
            [TEXTS, TEXTS[:1]], model=server.embed, output_dtype=dtype, output_dimension=8
        )
        same(
            [one.embeddings for one in answer.results],
            [[chunk["dense"] for chunk in row] for row in wanted],
        )
        assert answer.total_tokens > 2 * len(TEXTS)


@call
def contextualized_embed_of_queries(server: Server) -> None:
    answer = client(server).contextualized_embed(
        [[text] for text in TEXTS], model=server.embed, input_type="query"
    )
    prompt = server.ask("/info", alias=server.embed)["hybridtei"]["prompts"].get("query", "")
    spans = [
        {"text": prompt + text, "spans": [[len(prompt), len(prompt + text)]]} for text in TEXTS
    ]
    wanted = server.ask(
        "/embed_hybrid", {"inputs": spans, "outputs": ["dense"]}, alias=server.embed
    )
    same([one.embeddings for one in answer.results], [[row[0]["dense"]] for row in wanted])


@call
def rerank_with_top_k(server: Server) -> None:
    answer = client(server).rerank(QUERY, TEXTS, model=server.rerank, top_k=2)
    wanted = server.ranks(return_text=True)[:2]
    same(
        pairs(answer.results, "index", "relevance_score", "document"),
        pairs(wanted, "index", "score", "text"),
    )
    assert answer.total_tokens > 0


@call
def a_flat_list_of_queries(server: Server) -> None:
    try:
        answer = client(server).contextualized_embed(TEXTS, model=server.embed, input_type="query")
    except ValueError as error:
        raise Skipped(f"a version that takes no flat list: {error}") from None
    nested = client(server).contextualized_embed(
        [[text] for text in TEXTS], model=server.embed, input_type="query"
    )
    same([one.embeddings for one in answer.results], [one.embeddings for one in nested.results])


@call
def errors_are_read(server: Server) -> None:
    """Before 0.5.0 an `error` that is an object ends each of them in AttributeError, and in every
    version a `detail` that is a list ends in TypeError."""
    asked = client(server)
    refused(lambda: asked.embed([""], model=server.embed), "InvalidRequest", "cannot be empty")
    refused(lambda: asked.rerank("q", [], model=server.rerank), "InvalidRequest", "documents")
    refused(lambda: asked.embed(TEXTS, model="nobody"), "is not served here")
    refused(lambda: asked.rerank(QUERY, TEXTS, model=server.classify), "re-ranker")
    refused(
        lambda: asked.contextualized_embed([[""]], model=server.embed, input_type="query"),
        "InvalidRequest",
    )
    elsewhere = voyageai.Client(api_key="-", base_url=f"{server.url}/openai/v1", max_retries=0)
    refused(lambda: elsewhere.embed(TEXTS, model=server.embed), "/v1/embeddings exists")


main("voyageai", "voyageai")
