"""OpenAI's SDK."""

from __future__ import annotations

import base64
import struct

import openai
from harness import TEXTS, Server, call, main, refused, same


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


@call
def embeddings_as_base64_by_default(server: Server) -> None:
    answer = client(server).embeddings.create(model=server.embed, input=TEXTS)
    same([item.embedding for item in answer.data], server.vectors())
    assert answer.model == server.embed
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(TEXTS)


@call
def embeddings_as_base64_unpacked_by_hand(server: Server) -> None:
    raw = client(server).embeddings.with_raw_response.create(
        model=server.embed, input=TEXTS[0], encoding_format="base64"
    )
    packed = base64.b64decode(raw.http_response.json()["data"][0]["embedding"])
    same([*struct.unpack(f"<{len(packed) // 4}f", packed)], server.vectors([TEXTS[0]])[0])


@call
def embeddings_as_floats(server: Server) -> None:
    answer = client(server).embeddings.create(
        model=server.embed, input=TEXTS, encoding_format="float", user="me"
    )
    same([item.embedding for item in answer.data], server.vectors())


@call
def embeddings_with_dimensions(server: Server) -> None:
    answer = client(server).embeddings.create(model=server.embed, input=TEXTS[0], dimensions=8)
    same([item.embedding for item in answer.data], server.vectors([TEXTS[0]], dimensions=8))


@call
def embeddings_of_ids(server: Server) -> None:
    ids = [
        token["id"]
        for token in server.ask("/tokenize", {"inputs": TEXTS[0]}, alias=server.embed)[0]
    ]
    answer = client(server).embeddings.create(model=server.embed, input=[ids])
    same([item.embedding for item in answer.data], server.vectors([TEXTS[0]]))


@call
def batches_of_openais_limit(server: Server) -> None:
    """2,048 texts of 1,000 characters, and 1,000 of 4,000."""
    for count, characters in ((2048, 1000), (1000, 4000)):
        texts = [f"{number} {'bo ba ' * characters}"[:characters] for number in range(count)]
        answer = client(server).embeddings.create(model=server.embed, input=texts)
        assert [item.index for item in answer.data] == [*range(count)]
        same(answer.data[-1].embedding, server.vectors(texts[-1:])[0])
    refused(
        lambda: client(server).embeddings.create(model=server.embed, input=["bo"] * 2049),
        "2048",
    )


@call
def ids_of_another_tokenizer_are_refused(server: Server) -> None:
    """LangChain's `OpenAIEmbeddings` sends cl100k_base's ids by default."""
    refused(
        lambda: client(server).embeddings.create(model=server.embed, input=[[526, 656, 12]]),
        "check_embedding_ctx_length",
    )


@call
def models_are_listed(server: Server) -> None:
    found = [model.id for model in client(server).models.list()]
    assert {server.embed, server.rerank, server.classify, server.tag} <= set(found), found


@call
def errors_are_read(server: Server) -> None:
    refused(
        lambda: client(server).embeddings.create(model=server.embed, input=""),
        "BadRequestError",
        "cannot be empty",
    )
    refused(
        lambda: client(server).embeddings.create(model="nobody", input="bo"),
        "NotFoundError",
        "is not served here",
    )


main("openai", "openai")
