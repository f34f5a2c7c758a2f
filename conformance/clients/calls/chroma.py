"""Chroma's embedding functions, those whose address can be set."""

from __future__ import annotations

import warnings

from harness import TEXTS, Server, call, main, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import chromadb
    from chromadb.utils import embedding_functions

# That keys given as arguments are not kept
warnings.simplefilter("ignore")


@call
def hugging_face_embedding_server(server: Server) -> None:
    for url in (f"{server.url}/embed", server.url, f"{server.at(server.embed)}/embed"):
        same(
            embedding_functions.HuggingFaceEmbeddingServer(url=url, api_key="-")(TEXTS),
            server.vectors(),
        )


@call
def a_collection_finds_what_it_was_given(server: Server) -> None:
    embed = embedding_functions.HuggingFaceEmbeddingServer(url=f"{server.url}/embed")
    collection = chromadb.EphemeralClient().create_collection(
        "conformance", embedding_function=embed
    )
    collection.add(ids=[str(place) for place in range(len(TEXTS))], documents=TEXTS)
    found = collection.query(query_texts=TEXTS, n_results=1)
    assert found["ids"] == [[str(place)] for place in range(len(TEXTS))], found["ids"]


@call
def openai_embedding_function(server: Server) -> None:
    embed = embedding_functions.OpenAIEmbeddingFunction(
        api_key="-", api_base=f"{server.url}/v1", model_name=server.embed
    )
    same(embed(TEXTS), server.vectors())


@call
def baseten_embedding_function(server: Server) -> None:
    embed = embedding_functions.BasetenEmbeddingFunction(
        api_key="-", api_base=f"{server.at(server.embed)}/v1"
    )
    same(embed(TEXTS), server.vectors())


@call
def ollama_embedding_function(server: Server) -> None:
    embed = embedding_functions.OllamaEmbeddingFunction(url=server.url, model_name=server.embed)
    same(embed(TEXTS), server.vectors())


main("chromadb", "chromadb")
