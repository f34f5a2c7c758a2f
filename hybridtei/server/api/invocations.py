"""Dispatch of `/`, `/invocations`, `/rerank` and `/vertex`: by the keys of the body, or else by the model's kind."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from hybridtei.batch import Head
from hybridtei.errors import RequestRefused, TooManyInputs
from hybridtei.server.api import tei
from hybridtei.server.api.embed import embed, embed_sparse, similarity
from hybridtei.server.api.pages import INDEX, file_of_page, wants_page
from hybridtei.server.api.predict import EntitiesRequest, entities, predict
from hybridtei.server.api.rerank import RerankRequest, rerank, rerank_by_fields
from hybridtei.server.context import NOTHING, Context, Reply
from hybridtei.server.http.body import SchemaError, SyntaxRefused, decode, keys_of
from hybridtei.server.routing import get, post
from hybridtei.server.serve import HttpRequest
from hybridtei.system.tracing import spanned


class _Fields(Struct, frozen=True):
    """The fields of a body that select its route."""

    texts: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET


@get("/", in_schema=False, role=None, is_tei=True)
async def root(context: Context, request: HttpRequest) -> Reply:
    """The page for browsers; a health check for other clients."""
    has_page = request.scope["method"] == "GET" and not context.server.only_tei_routes
    if has_page and wants_page(request.scope["headers"]):
        return file_of_page(INDEX)
    await context.service.check_health()
    if context.server.only_tei_routes:
        return NOTHING
    # Ollama's clients look for these words
    return Reply(b"Ollama is running", media_type=b"text/plain; charset=utf-8")


@post(["/", "/invocations"], bytes, Any, span=None, in_schema=False, is_tei=True)
async def by_model(context: Context, request: bytes) -> Reply:
    """Reranking, similarity, or the route of the model's kind. The body's fields replace TEI's TASK variable."""
    fields = keys_of(request, _Fields)
    inputs = b"" if fields.inputs is UNSET else bytes(fields.inputs)
    if inputs.startswith(b"{"):
        if keys_of(inputs, _Fields).query is UNSET:
            return await _similarity(context, request)
        # LiteLLM puts it there
        return await spanned("rerank", rerank_by_fields(context, inputs))
    asks_rank = fields.query is not UNSET and (
        fields.texts is not UNSET or fields.documents is not UNSET
    )
    if asks_rank or context.service.model.spec.kind == "reranker":
        return await spanned("rerank", rerank_by_fields(context, request))
    if (
        context.server.task == "sentence-similarity"
        and context.service.model.spec.kind == "embedding"
    ):
        return await _similarity(context, request)
    return await of_kind(context, request)


async def _similarity(context: Context, data: bytes) -> Reply:
    return await spanned("similarity", similarity(context, decode(data, tei.SimilarityRequest)))


async def of_kind(context: Context, data: bytes) -> Reply:
    """Run the route of the model's kind."""
    spec = context.service.model.spec
    if Head.SCORES in spec.heads:
        return await spanned("predict", predict(context, decode(data, tei.PredictRequest)))
    if Head.TAGS in spec.heads:
        return await spanned("entities", entities(context, decode(data, EntitiesRequest)))
    if spec.is_splade:
        request = decode(data, tei.EmbedSparseRequest)
        return await spanned("embed_sparse", embed_sparse(context, request))
    return await spanned("embed", embed(context, decode(data, tei.EmbedRequest)))


@post("/vertex", tei.VertexRequest, Any, in_schema=False, is_tei=True, span="vertex_compatibility")
async def vertex(context: Context, request: tei.VertexRequest) -> Reply:
    """Run all instances concurrently. Raises the error of the first failing instance;
    RequestRefused above the batch limit."""
    limit = context.server.max_client_batch_size
    if (
        len(request.instances) > limit
    ):  # each instance may be a whole batch, so this list is never split
        raise TooManyInputs(
            f"batch size {len(request.instances)} > maximum allowed batch size {limit}"
        )
    replies = await asyncio.gather(
        *(_instance(context, bytes(raw)) for raw in request.instances), return_exceptions=True
    )
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    answered = [reply for reply in replies if isinstance(reply, Reply)]
    return Reply(
        {"predictions": [reply.answer for reply in answered]},
        numbers=sum(reply.numbers for reply in answered),
    )


async def _instance(context: Context, data: bytes) -> Reply:
    if keys_of(data, _Fields).texts is not UNSET:
        with suppress(SchemaError, SyntaxRefused):
            return await spanned("rerank", rerank(context, decode(data, RerankRequest)))
    try:
        return await of_kind(context, data)
    except (SchemaError, SyntaxRefused) as error:
        raise RequestRefused(error.detail) from None
