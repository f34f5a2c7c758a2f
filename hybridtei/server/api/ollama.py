"""Embeddings as Ollama's clients ask for them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from hybridtei.server.api.tei import Size


class OllamaEmbedRequest(Struct, frozen=True, kw_only=True):
    """`/api/embed`."""

    input: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    model: Annotated[str | None, Meta(description="Which model is to answer, where there are several.")] = None
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default, as Ollama's: true].")] = None
    dimensions: Annotated[Size | None, Meta(description="Keep the first so many dimensions.")] = None


class OllamaEmbedResponse(Struct, frozen=True):
    """Answer of `/api/embed`; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
