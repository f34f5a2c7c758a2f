"""What `/`, `/invocations`, `/rerank` and `/vertex` mean: the keys of a body decide, and where they do not, the model."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from msgspec import UNSET, Raw, UnsetType

from hybridtei.batch import Head
from hybridtei.errors import RequestRefused, TooManyInputs
from hybridtei.observability.tracing import handler, passes_on
from hybridtei.server.api import tei
from hybridtei.server.api.classify import predict
from hybridtei.server.api.embed import embed, embed_sparse, similarity
from hybridtei.server.api.rerank import DocumentsRequest, RerankKeys, RerankRequest, rerank, rerank_documents
from hybridtei.server.api.tagging import EntitiesRequest, entities
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.body import SchemaError, SyntaxRefused, decode, keys_of

T = TypeVar("T")


class _Keys(RerankKeys, frozen=True):
    inputs: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET


@passes_on
async def by_model(context: Context, body: Raw) -> Reply:
    """`/`: reranking, similarity, or the route that fits the model; where TEI needs its TASK variable, the keys tell."""
    data = bytes(body)
    keys = keys_of(data, _Keys)
    inputs = b"" if keys.inputs is UNSET else bytes(keys.inputs)
    if inputs.startswith(b"{"):
        if keys_of(inputs, _Keys).query is UNSET:
            return await similarity(context, decode(data, tei.SimilarityRequest))
        return await by_keys(context, Raw(inputs))  # LiteLLM lays it there
    asks_rank = keys.query is not UNSET and (keys.texts is not UNSET or keys.documents is not UNSET)
    if asks_rank or context.service.model.spec.kind == "reranker":
        return await by_keys(context, body)
    if context.server.task == "sentence-similarity" and context.service.model.spec.kind == "embedding":
        return await similarity(context, decode(data, tei.SimilarityRequest))
    return await of_kind(context, data)


async def of_kind(context: Context, data: bytes) -> Reply:
    """By the model alone."""
    spec = context.service.model.spec
    if Head.SCORES in spec.heads:
        return await predict(context, decode(data, tei.PredictRequest))
    if Head.TAGS in spec.heads:
        return await entities(context, decode(data, EntitiesRequest))
    if spec.is_splade:
        return await embed_sparse(context, decode(data, tei.EmbedSparseRequest))
    return await embed(context, decode(data, tei.EmbedRequest))


@passes_on
async def by_keys(context: Context, body: Raw) -> Reply:
    """`/rerank`: `texts` is TEI's, `documents` everybody else's."""
    data = bytes(body)
    keys = keys_of(data, RerankKeys)
    if keys.texts is UNSET and keys.documents is not UNSET:
        request = decode(data, DocumentsRequest)
        by_default = context.server.rerank_documents_as == "string"
        # Only infinity's own client always says `raw_scores`, and it needs a string; vLLM's never does, and needs an object.
        return await rerank_documents(context, request, plain=by_default or request.raw_scores is not UNSET)
    return await rerank(context, decode(data, RerankRequest))


@handler("vertex_compatibility")
async def vertex(context: Context, request: tei.VertexRequest) -> Reply:
    """All instances at once; the first failing one by place decides the error. As many as a client may send inputs."""
    limit = context.server.max_client_batch_size
    if len(request.instances) > limit:  # each may be a batch, and they run at once: these are never answered in parts
        raise TooManyInputs(f"batch size {len(request.instances)} > maximum allowed batch size {limit}")
    replies = await asyncio.gather(*(_instance(context, bytes(raw)) for raw in request.instances), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    told = [reply for reply in replies if isinstance(reply, Reply)]
    return Reply({"predictions": [reply.answer for reply in told]}, numbers=sum(reply.numbers for reply in told))


async def _instance(context: Context, data: bytes) -> Reply:
    request = _if_fits(data, RerankRequest)
    if request is not None:
        return await rerank(context, request)
    try:
        return await of_kind(context, data)
    except (SchemaError, SyntaxRefused) as error:
        raise RequestRefused(error.message) from None


def _if_fits(data: bytes, kind: type[T]) -> T | None:
    try:
        return decode(data, kind)
    except (SchemaError, SyntaxRefused):
        return None
