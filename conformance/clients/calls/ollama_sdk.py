"""Ollama's own client."""

from __future__ import annotations

import ollama
from harness import TEXTS, Server, call, main, refused, same


def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, trust_env=False)


@call
def embeddings(server: Server) -> None:
    answer = client(server).embed(model=server.embed, input=TEXTS)
    same([*answer.embeddings], server.vectors())
    assert answer.prompt_eval_count > len(TEXTS)


@call
def embeddings_with_dimensions(server: Server) -> None:
    answer = client(server).embed(model=server.embed, input=TEXTS[0], dimensions=8)
    same([*answer.embeddings], server.vectors([TEXTS[0]], dimensions=8))


@call
def embeddings_of_a_prompt(server: Server) -> None:
    answer = client(server).embeddings(model=server.embed, prompt=TEXTS[0])
    same([*answer.embedding], server.vectors([TEXTS[0]], normalize=False)[0])


@call
def models_are_listed(server: Server) -> None:
    names = [model.model for model in client(server).list().models]
    assert any(str(name).startswith(server.embed) for name in names), names


@call
def errors_are_read(server: Server) -> None:
    refused(
        lambda: client(server).embed(model=server.embed, input=["bo", ""]),
        "ResponseError",
        "`input[1]` cannot be empty",
    )


main("ollama", "ollama")
