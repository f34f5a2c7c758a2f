"""Dispatch of `/`, `/invocations` and `/vertex`: the keys of a body choose its route, and that
route its model. Texts alone go to the route of the model's kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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
from hybridtei.server.http.body import SchemaError, SyntaxRefused, decode_in_turn, keys_of
from hybridtei.server.models import CLASSIFY, EMBED, RANK, TAG, Models
from hybridtei.server.routing import get, post
from hybridtei.server.serve import HttpRequest
from hybridtei.system.tracing import spanned


class _Parameters(Struct, frozen=True):
    """The parameters of Hugging Face's clients that belong to one task."""

    top_k: Raw | UnsetType = UNSET
    function_to_apply: Raw | UnsetType = UNSET
    aggregation_strategy: Raw | UnsetType = UNSET
    ignore_labels: Raw | UnsetType = UNSET


class _Fields(Struct, frozen=True):
    """The fields of a body that select its route and its model."""

    texts: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET
    raw_scores: Raw | UnsetType = UNSET
    normalize: Raw | UnsetType = UNSET
    dimensions: Raw | UnsetType = UNSET
    prompt_name: Raw | UnsetType = UNSET
    model: Any = None

    @property
    def ranks(self) -> bool:
        """True for a query and its texts."""
        listed = self.texts is not UNSET or self.documents is not UNSET
        return self.query is not UNSET and listed

    @property
    def within(self) -> _Fields | None:
        """The fields of `inputs` if it is an object, as LiteLLM and Hugging Face's client send."""
        inputs = b"" if self.inputs is UNSET else bytes(self.inputs)
        return keys_of(inputs, _Fields) if inputs.startswith(b"{") else None

    @property
    def capability(self) -> Sequence[Callable[[Context], bool]]:
        """The capability of the route that the fields select."""
        parameters = _Parameters()
        if self.parameters is not UNSET:
            parameters = keys_of(bytes(self.parameters), _Parameters)
        within = self.within
        if self.ranks or (within is not None and within.query is not UNSET):
            return RANK
        if parameters.aggregation_strategy is not UNSET or parameters.ignore_labels is not UNSET:
            return TAG
        for field in (parameters.top_k, parameters.function_to_apply, self.raw_scores):
            if field is not UNSET:
                return CLASSIFY
        for field in (self.normalize, self.dimensions, self.prompt_name):
            if field is not UNSET:
                return EMBED
        return EMBED if within is not None else (_reads_texts,)


def _reads_texts(context: Context) -> bool:
    """True for a model that answers texts alone."""
    return any(able(context) for able in (*EMBED, CLASSIFY[0], *TAG))


def _context(models: Models, fields: _Fields) -> Context:
    """The model that the path or the body names, else the first one with the route's capability."""
    name = fields.model if isinstance(fields.model, str) else None
    return models.choose(models.alias, name, fields.capability)


@get("/", in_schema=False, role=None, is_tei=True)
async def root(context: Context, request: HttpRequest) -> Reply:
    """The page for browsers; a health check for other clients."""
    has_page = request.scope["method"] == "GET" and not context.server.as_tei
    if has_page and wants_page(request.scope["headers"]):
        return file_of_page(INDEX)
    await context.service.check_health()
    if context.server.as_tei:
        return NOTHING
    # Ollama's clients look for these words
    return Reply(b"Ollama is running", media_type=b"text/plain; charset=utf-8")


@post(["/", "/invocations"], bytes, Any, source="models", span=None, in_schema=False, is_tei=True)
async def by_fields(models: Models, request: bytes) -> Reply:
    """Reranking, similarity, or the route of the model's kind. The body's fields replace TEI's TASK
    variable."""
    fields = keys_of(request, _Fields)
    context, within = _context(models, fields), fields.within
    kind = context.service.model.spec.role
    if within is not None:
        if within.query is UNSET:
            return await _similarity(context, request)
        # LiteLLM puts the query and its texts into `inputs`
        assert fields.inputs is not UNSET
        return await spanned("rerank", rerank_by_fields(context, bytes(fields.inputs)))
    # TEI's `/` of a reranker only ranks; of several models the keys of `/predict` choose it
    only_ranks = len(models.ready) == 1 or fields.capability is not CLASSIFY
    if fields.ranks or (kind == "reranker" and only_ranks):
        return await spanned("rerank", rerank_by_fields(context, request))
    if context.server.task == "sentence-similarity" and kind == "embedding":
        return await _similarity(context, request)
    return await of_kind(context, request)


async def _similarity(context: Context, data: bytes) -> Reply:
    return await spanned(
        "similarity", similarity(context, await decode_in_turn(data, tei.SimilarityRequest))
    )


async def of_kind(context: Context, data: bytes) -> Reply:
    """Run the route of the model's kind."""
    spec = context.service.model.spec
    if Head.SCORES in spec.heads:
        return await spanned(
            "predict", predict(context, await decode_in_turn(data, tei.PredictRequest))
        )
    if Head.TAGS in spec.heads:
        return await spanned(
            "entities", entities(context, await decode_in_turn(data, EntitiesRequest))
        )
    if Head.SPARSE in spec.heads and Head.DENSE not in spec.heads:
        request = await decode_in_turn(data, tei.EmbedSparseRequest)
        return await spanned("embed_sparse", embed_sparse(context, request))
    return await spanned("embed", embed(context, await decode_in_turn(data, tei.EmbedRequest)))


@post(
    "/vertex",
    tei.VertexRequest,
    Any,
    source="models",
    in_schema=False,
    is_tei=True,
    span="vertex_compatibility",
)
async def vertex(models: Models, request: tei.VertexRequest) -> Reply:
    """Run all instances concurrently. Raises the error of the first failing instance;
    RequestRefused above the batch limit."""
    limit = models.default.server.max_client_batch_size
    # Each instance may be a whole batch, so this list is never split
    if len(request.instances) > limit:
        raise TooManyInputs(
            f"batch size {len(request.instances)} > maximum allowed batch size {limit}"
        )
    instances = [_instance(models, bytes(raw)) for raw in request.instances]
    results = await asyncio.gather(*instances, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    replies = [result for result in results if isinstance(result, Reply)]
    return Reply(
        {"predictions": [reply.answer for reply in replies]},
        numbers=sum(reply.numbers for reply in replies),
    )


async def _instance(models: Models, data: bytes) -> Reply:
    fields = keys_of(data, _Fields)
    context = _context(models, fields)
    if fields.texts is not UNSET:
        with suppress(SchemaError, SyntaxRefused):
            return await spanned(
                "rerank", rerank(context, await decode_in_turn(data, RerankRequest))
            )
    try:
        return await of_kind(context, data)
    except (SchemaError, SyntaxRefused) as error:
        raise RequestRefused(error.detail) from None
