"""Our own routes: several outputs of one forward pass."""

from __future__ import annotations

from litestar import post
from litestar.response.base import ASGIResponse

from hybridtei.server import answers
from hybridtei.server.serve import AnyRequest, serve
from hybridtei.server.wire.hybrid import EmbedHybridRequest, EmbedMultivectorRequest


@post("/embed_hybrid", status_code=200)
async def embed_hybrid(request: AnyRequest) -> ASGIResponse:
    return await serve(request, EmbedHybridRequest, answers.embed_hybrid)


@post("/embed_multivector", status_code=200)
async def embed_multivector(request: AnyRequest) -> ASGIResponse:
    return await serve(request, EmbedMultivectorRequest, answers.embed_multivector)


ROUTES = (embed_hybrid, embed_multivector)
