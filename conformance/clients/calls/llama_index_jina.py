"""LlamaIndex's JinaEmbedding, which names the form of vectors as Jina did before
`embedding_type`."""

from __future__ import annotations

import asyncio

from harness import TEXTS, Server, call, main, refused, same
from llama_index.embeddings.jinaai import JinaEmbedding


def jina(server: Server, **settings: str) -> JinaEmbedding:
    found = JinaEmbedding(api_key="-", model=server.embed, **settings)
    # The only way to another address
    found._api.api_url = f"{server.url}/v1/embeddings"
    return found


def signs(row: list[float]) -> list[int]:
    return [int(number > 0) for number in row]


@call
def floats(server: Server) -> None:
    found = jina(server)
    same(found.get_text_embedding_batch(TEXTS), server.vectors())
    same(found.get_query_embedding(TEXTS[0]), server.vectors([TEXTS[0]])[0])


@call
def bits_of_either_sign(server: Server) -> None:
    wanted = [signs(row) for row in server.vectors()]
    for kind in ("binary", "ubinary"):
        found = jina(server, encoding_queries=kind, encoding_documents=kind)
        same(found.get_text_embedding_batch(TEXTS), wanted)
        same(found.get_query_embedding(TEXTS[0]), wanted[0])
        same(asyncio.run(found.aget_text_embedding(TEXTS[1])), wanted[1])


@call
def errors_are_read(server: Server) -> None:
    refused(lambda: jina(server).get_text_embedding_batch([""]), "RuntimeError", "cannot be empty")


main("llama-index JinaEmbedding", "llama-index-embeddings-jinaai")
