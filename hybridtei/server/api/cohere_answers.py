"""Cohere's embeddings."""

from __future__ import annotations

import uuid
from typing import Any

from hybridtei.batch import Head
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Embeddings, Floats
from hybridtei.server.api.cohere import CohereEmbedRequest, EmbeddingType
from hybridtei.server.api.tei import Inputs
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.errors import NoInputs
from hybridtei.server.http.json_writer import as_base64
from hybridtei.server.http.quantised import Quantise, quantiser
from hybridtei.server.observe import Usage
from hybridtei.tasks.embed import Embed, InputType

SIDES: dict[str, InputType] = {"search_query": "query", "search_document": "document"}


@handler("cohere_embed")
async def embed(context: Context, request: CohereEmbedRequest) -> Reply:
    """`/v2/embed`: of unit length, and only in the forms that were asked for: some clients fail on null."""
    return await _embed(context, request, version="2")


@handler("cohere_embed")
async def embed_v1(context: Context, request: CohereEmbedRequest) -> Reply:
    """`/v1/embed`: as `/v2/embed`, but a bare list of vectors where no forms were asked for."""
    return await _embed(context, request, version="1", bare=not request.embedding_types)


async def _embed(context: Context, request: CohereEmbedRequest, *, version: str, bare: bool = False) -> Reply:
    texts = request.read
    if not texts:
        raise NoInputs("`texts` cannot be empty")
    inputs = Inputs([*texts], is_batch=True)
    task = Embed(
        inputs.items,
        frozenset({Head.DENSE}),
        truncate=request.truncate != "NONE",
        direction="left" if request.truncate == "START" else "right",
        dimensions=request.output_dimension,
        input_type=SIDES.get(request.input_type or ""),
    )

    whole = context.service.model.spec.dense_width
    width = min(request.output_dimension or whole, whole)
    with context.counting_failures():
        makers = {form: _maker(context, form, width) for form in request.embedding_types or ["float"]}

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        assert answer.dense is not None
        dense = answer.dense
        return {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_floats" if bare else "embeddings_by_type",
            "embeddings": dense if bare else {form: make(dense) for form, make in makers.items()},
            "texts": texts,
            "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": usage.tokens}},
        }

    return await context.embed(task, inputs, write, numbers=len(makers) * len(texts) * whole, field="texts")


def _maker(context: Context, form: EmbeddingType, width: int) -> Quantise:
    return _texts if form == "base64" else quantiser(context, form, "dense", width)


def _texts(rows: Floats) -> list[str]:
    return [as_base64(row) for row in rows]
