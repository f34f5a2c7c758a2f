"""tei-client over gRPC, which cannot say whose model it wants: it needs a server for each kind."""

from __future__ import annotations

from harness import QUERY, TEXTS, Server, Skipped, call, main, pairs, same
from tei_client import GrpcClient


def client(server: Server, alias: str) -> GrpcClient:
    if alias not in server.grpc:
        raise Skipped(f"no gRPC server of {alias} alone")
    return GrpcClient(server.grpc[alias])


@call
def info(server: Server) -> None:
    plain, found = server.ask("/info", alias=server.embed), client(server, server.embed).info()
    assert (found.server_model_type.value, found.max_input_length) == (
        "embedding",
        plain["max_input_length"],
    )


@call
def prompt_names(server: Server) -> None:
    wanted = [*server.ask("/info", alias=server.embed)["hybridtei"]["prompts"]]
    same(
        sorted(name for name in client(server, server.embed).prompt_names() if name), sorted(wanted)
    )


@call
def embed(server: Server) -> None:
    same([[*row] for row in client(server, server.embed).embed(TEXTS)], server.vectors())


@call
def embed_all(server: Server) -> None:
    found = client(server, server.embed).embed_all(TEXTS)
    wanted = server.ask("/embed_all", {"inputs": TEXTS}, alias=server.embed)
    same([[[*row] for row in rows] for rows in found], wanted)


@call
def tokenize_and_decode(server: Server) -> None:
    asking = client(server, server.embed)
    found = asking.tokenize(TEXTS)
    plain = server.ask("/tokenize", {"inputs": TEXTS}, alias=server.embed)
    same(
        [pairs(one.tokens, "id", "text", "special") for one in found],
        [pairs(one, "id", "text", "special") for one in plain],
    )
    same([*asking.decode([one.get_ids() for one in found])], TEXTS)


@call
def classify(server: Server) -> None:
    found = client(server, server.classify).classify(TEXTS)
    same(
        [pairs(group.scores, "label", "score") for group in found],
        [pairs(group, "label", "score") for group in server.labels()],
    )


@call
def rerank(server: Server) -> None:
    answer = client(server, server.rerank).rerank(QUERY, TEXTS, return_text=True)
    same(
        pairs(answer.ranks, "index", "score", "text"),
        pairs(server.ranks(return_text=True), "index", "score", "text"),
    )


main("tei-client (gRPC)", "tei-client")
