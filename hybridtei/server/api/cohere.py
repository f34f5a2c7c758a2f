"""Cohere's embedding API. Versions 1 and 2 differ in their answers."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei.batch import Head
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.inference.tasks.embed import Embed
from hybridtei.options import Dimensions, EmbedOptions
from hybridtei.outputs import Embeddings, Floats, Usage
from hybridtei.server.answers import as_base64
from hybridtei.server.api.tei import (
    NOT_EMPTY,
    SIDES,
    FullText,
    FullTexts,
    PromptTokens,
    ServedModel,
    texts_of,
)
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.body import SchemaError
from hybridtei.server.models import EMBED
from hybridtei.server.routing import post
from hybridtei.server.vectors import quantiser
from hybridtei.server.wires import ClientsErrorResponse, Form, Wire

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereText(Struct, frozen=True):
    """A part of an input. Only text is accepted."""

    text: FullText
    type: Literal["text"] = "text"


class CohereInput(Struct, frozen=True):
    """An input in parts, read as one text."""

    content: Annotated[list[CohereText], NOT_EMPTY]


class CohereEmbedRequest(Struct, frozen=True, kw_only=True):
    """Request of `/v1/embed` and `/v2/embed`."""

    texts: FullTexts | None = None
    inputs: Annotated[list[CohereInput], NOT_EMPTY] | None = None
    images: Form = None
    model: ServedModel = None
    input_type: Annotated[
        str | None,
        Meta(
            description="search_query or search_document, for models that treat them differently."
        ),
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, Meta(description="Forms of the vectors [default: float].")
    ] = None
    output_dimension: Dimensions = None
    max_tokens: PromptTokens = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        Meta(description="The side that is cut off; NONE: refuse."),
    ] = None

    @property
    def options(self) -> EmbedOptions:
        return EmbedOptions(
            truncate=self.truncate != "NONE",
            truncation_direction="left" if self.truncate == "START" else "right",
            max_tokens=self.max_tokens,
            dimensions=self.output_dimension,
            input_type=SIDES.get(self.input_type),
        )

    @property
    def read(self) -> list[str]:
        """All texts. Raises SchemaError."""
        if self.texts is not None:
            return self.texts
        if self.inputs is None:
            raise SchemaError("missing field `texts`")
        return ["\n".join(part.text for part in item.content) for item in self.inputs]


class CohereEmbedResponse(Struct, frozen=True):
    """One vector a text for each requested form. Version 1 answers a plain list of vectors if no
    form was requested."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | dict[EmbeddingType, list[Any]]
    texts: list[str]
    meta: dict[str, Any]


COHERE = Wire(
    tried="cohere, cohere-ai, litellm", error=ClientsErrorResponse, forms={"images": ([],)}
)


@post(
    "/v1/embed",
    CohereEmbedRequest,
    CohereEmbedResponse,
    span="cohere_embed",
    capability=EMBED,
    wire=COHERE,
)
async def cohere_embed_v1(context: Context, request: CohereEmbedRequest) -> Reply:
    """Cohere embeddings: unit vectors, only in the requested forms, since some clients fail on
    null."""
    return await _embed(context, request, "1")


@post(
    "/v2/embed",
    CohereEmbedRequest,
    CohereEmbedResponse,
    span="cohere_embed",
    capability=EMBED,
    wire=COHERE,
)
async def cohere_embed_v2(context: Context, request: CohereEmbedRequest) -> Reply:
    """Cohere embeddings: unit vectors, only in the requested forms, since some clients fail on
    null."""
    return await _embed(context, request, "2")


async def _embed(context: Context, request: CohereEmbedRequest, version: str) -> Reply:
    texts = texts_of(request.read, "texts")
    # Version 1 answers a plain list if no form was requested
    is_plain = version == "1" and not request.embedding_types
    task = Embed(
        texts,
        frozenset({Head.DENSE}),
        context.settled(request.options),
    )
    full_width = context.service.model.spec.dense_width
    width = min(request.output_dimension or full_width, full_width)
    with context.counting_failures():
        makers = {
            form: _texts if form == "base64" else quantiser(context, form, Head.DENSE, width)
            for form in request.embedding_types or ["float"]
        }

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        assert answer.dense is not None
        dense = answer.dense
        return {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
            "embeddings": dense
            if is_plain
            else {form: make(dense) for form, make in makers.items()},
            "texts": texts,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": usage.tokens},
            },
        }

    field = "inputs" if request.texts is None else "texts"
    # The answer repeats the texts
    numbers = len(makers) * len(texts) * full_width
    numbers += 2 * sum(map(len, texts)) // BYTES_PER_NUMBER
    return await context.embed(task, write, numbers=numbers, field=field)


def _texts(rows: Floats) -> list[str]:
    return [as_base64(row) for row in rows]
