"""Embeddings as Ollama's clients ask for them."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Annotated, Any

from msgspec import Meta, Struct

from hybridtei.batch import Head
from hybridtei.errors import NoInputs, UnsupportedHead
from hybridtei.outputs import Embeddings, Usage
from hybridtei.server.api.embed import SPLADE_NORMALIZE
from hybridtei.server.api.tei import Size
from hybridtei.server.context import Context, Reply
from hybridtei.server.inputs import Inputs
from hybridtei.server.registry import EMBED
from hybridtei.server.routing import Route
from hybridtei.tasks.embed import Embed


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


async def ollama_embed(context: Context, request: OllamaEmbedRequest) -> Reply:
    """`/api/embed`: of unit length, and a list even for one text; what is too long is cut unless `truncate` is false."""
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts:
        raise NoInputs("`input` cannot be empty")
    inputs = Inputs([*texts], is_batch=True)
    heads = frozenset({Head.DENSE})
    task = Embed(inputs.items, heads, truncate=request.truncate is not False, dimensions=request.dimensions)
    refusal = UnsupportedHead(SPLADE_NORMALIZE) if context.is_splade else None
    began_ns = perf_counter_ns()

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        assert answer.dense is not None
        return {
            "model": context.served_name,
            "embeddings": answer.dense,
            "total_duration": perf_counter_ns() - began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.tokens,
        }

    field = None if isinstance(request.input, str) else "input"
    return await context.embed(task, inputs, write, refusal=refusal, field=field)


ROUTES = (
    Route(
        path="/api/embed",
        handler=ollama_embed,
        request=OllamaEmbedRequest,
        response=OllamaEmbedResponse,
        summary="Ollama embeddings",
        capability=EMBED,
        needs_content_type=False,
    ),
)
