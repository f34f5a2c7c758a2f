"""TEI's routes. What they compute lies in `answers`; here, which of it `/`, `/invocations` and `/vertex` mean."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from hybridtei.server import answers
from hybridtei.server.body import SchemaError, SyntaxRefused, decode
from hybridtei.server.context import Context, Reply
from hybridtei.server.encoding import joined
from hybridtei.server.errors import RequestRefused
from hybridtei.server.serve import AnyRequest, serve
from hybridtei.server.wire import tei


@post("/embed", status_code=200)
async def embed(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.EmbedRequest, answers.embed)


@post("/embed_all", status_code=200)
async def embed_all(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.EmbedAllRequest, answers.embed_all)


@post("/embed_sparse", status_code=200)
async def embed_sparse(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.EmbedSparseRequest, answers.embed_sparse)


@post("/similarity", status_code=200)
async def similarity(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.SimilarityRequest, answers.similarity)


@post("/predict", status_code=200)
async def predict(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.PredictRequest, answers.predict)


@post("/rerank", status_code=200)
async def rerank(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.RerankRequest, answers.rerank)


@post("/tokenize", status_code=200)
async def tokenize(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.TokenizeRequest, answers.tokenize)


@post("/decode", status_code=200)
async def decode_ids(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.DecodeRequest, answers.decode)


@post(["/", "/invocations"], status_code=200)
async def by_model(request: AnyRequest) -> ASGIResponse:
    """The route that fits the model; what the body is about decides where TEI needs its TASK variable."""
    return await serve(request, msgspec.Raw, _by_model)


@post("/vertex", status_code=200)
async def vertex(request: AnyRequest) -> ASGIResponse:
    return await serve(request, tei.VertexRequest, _vertex)


class _Shape(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw(b"null")


async def _by_model(context: Context, body: msgspec.Raw) -> Reply:
    data = bytes(body)
    if context.server.task == "sentence-similarity" or bytes(decode(data, _Shape).inputs).startswith(b"{"):
        return await answers.similarity(context, decode(data, tei.SimilarityRequest))
    return await _of_kind(context, data)


async def _of_kind(context: Context, data: bytes) -> Reply:
    if context.service.model.spec.is_splade:
        return await answers.embed_sparse(context, decode(data, tei.EmbedSparseRequest))
    return await answers.embed(context, decode(data, tei.EmbedRequest))


async def _vertex(context: Context, request: tei.VertexRequest) -> Reply:
    """All instances at once; the first failing one by place decides the error. As many as a client may send inputs."""
    context.check_batch(len(request.instances))
    replies = await asyncio.gather(*(_instance(context, bytes(raw)) for raw in request.instances), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    bodies = (reply.body for reply in replies if isinstance(reply, Reply))
    return Reply(b'{"predictions":' + joined(bodies) + b"}")


async def _instance(context: Context, data: bytes) -> Reply:
    rerank_request = _if_fits(data, tei.RerankRequest)
    if rerank_request is not None:
        return await answers.rerank(context, rerank_request)
    try:
        return await _of_kind(context, data)
    except (SchemaError, SyntaxRefused) as error:
        raise RequestRefused(str(error).removeprefix(error.prefix)) from None


def _if_fits(data: bytes, kind: type[Any]) -> Any:
    try:
        return decode(data, kind)
    except (SchemaError, SyntaxRefused):
        return None


ROUTES = (embed, embed_all, embed_sparse, similarity, predict, rerank, tokenize, decode_ids, by_model, vertex)
