"""OpenAI's embeddings request and answer, with `outputs` of ours."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hybridtei.server.wire.hybrid import Outputs, SparseFormat
from hybridtei.server.wire.tei import RawInputs, Size


class OpenAICompatRequest(Struct, frozen=True, kw_only=True):
    """`/v1/embeddings`."""

    input: Annotated[RawInputs, Meta(description="A text, a list of ids, or a list of texts and id lists.")]
    model: Annotated[str | None, Meta(description="Accepted and not looked at.")] = None
    user: Annotated[str | None, Meta(description="Accepted and not looked at.")] = None
    encoding_format: Annotated[Literal["float", "base64"], Meta(description="base64: little-endian float32.")] = "float"
    dimensions: Annotated[Size | None, Meta(description="Keep the first so many dimensions.")] = None
    outputs: Annotated[Outputs | None, Meta(description="Ours: also give `sparse_embedding` and `multivector`.")] = None
    sparse_format: Annotated[SparseFormat, Meta(description="Ours: form of `sparse_embedding`.")] = "qdrant"


class OpenAICompatUsage(Struct, frozen=True):
    """Tokens that ran, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class OpenAICompatEmbedding(Struct, frozen=True):
    """One input's vectors."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class OpenAICompatResponse(Struct, frozen=True):
    """Answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[OpenAICompatEmbedding]
    model: str
    usage: OpenAICompatUsage


class OpenAICompatErrorResponse(Struct, frozen=True):
    """Errors of `/v1/embeddings`, flat as TEI's."""

    message: str
    code: int
    type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
