"""OpenAI's embeddings route, under both of its paths."""

from __future__ import annotations

from litestar import post
from litestar.response.base import ASGIResponse

from hybridtei.errors import HybridTeiError
from hybridtei.server import answers
from hybridtei.server.errors import openai_error
from hybridtei.server.serve import AnyRequest, serve
from hybridtei.server.wire.openai import OpenAICompatRequest


@post("/v1/embeddings", status_code=200, exception_handlers={HybridTeiError: openai_error})
async def v1_embeddings(request: AnyRequest) -> ASGIResponse:
    """A missing content type passes here: some clients of this route send none."""
    return await serve(request, OpenAICompatRequest, answers.openai_embed, type_required=False)


@post("/embeddings", status_code=200, exception_handlers={HybridTeiError: openai_error})
async def embeddings(request: AnyRequest) -> ASGIResponse:
    return await serve(request, OpenAICompatRequest, answers.openai_embed)


ROUTES = (v1_embeddings, embeddings)
