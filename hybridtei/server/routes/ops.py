"""Health, facts, metrics and documentation."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from litestar import MediaType, Response, get
from litestar.exceptions import NotFoundException
from litestar.response import Redirect
from litestar.response.base import ASGIResponse

from hybridtei import __version__
from hybridtei.server.context import Context
from hybridtei.server.errors import StatusOnly
from hybridtei.server.openapi import document
from hybridtei.server.serve import AnyRequest, context_of

JSON = "application/json"
POOLING_NAMES = {"lasttoken": "last_token"}
DOCS_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
DOCS_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>hybridtei</title><link rel="stylesheet" href="swagger-ui.css"></head>
<body><div id="docs"></div><script src="swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "../api-doc/openapi.json", dom_id: "#docs"})</script></body></html>
"""


@get(["/", "/health", "/ping"])
async def health(request: AnyRequest) -> Response[bytes]:
    """200 without a body, or 503."""
    await context_of(request).service.check_health()
    return StatusOnly(200)


@get("/info")
async def info(request: AnyRequest) -> ASGIResponse:
    """TEI's keys in TEI's order, then ours."""
    return ASGIResponse(body=orjson.dumps(facts(context_of(request))), media_type=JSON)


@get("/metrics")
async def metrics(request: AnyRequest) -> ASGIResponse:
    body = context_of(request).registry.text().encode()
    return ASGIResponse(body=body, headers={"content-type": "text/plain; charset=utf-8"})


@get("/api-doc/openapi.json")
async def openapi() -> ASGIResponse:
    return ASGIResponse(body=_document(), media_type=JSON)


@get("/docs")
async def docs() -> Redirect:
    return Redirect("/docs/", status_code=303)


@get("/docs/{name:path}", media_type=MediaType.HTML)
async def docs_file(request: AnyRequest) -> Response[bytes]:
    """Swagger UI, from the package that carries it: it works without a network."""
    name = str(request.path_params["name"]).strip("/")
    if name in ("", "index.html"):
        return Response(DOCS_PAGE.encode(), media_type=MediaType.HTML)
    if name not in DOCS_FILES:
        raise NotFoundException
    return Response(_swagger_ui(name), media_type=DOCS_FILES[name])


@cache
def _document() -> bytes:
    return orjson.dumps(document())


@cache
def _swagger_ui(name: str) -> bytes:
    vendor = files("swagger_ui_bundle").joinpath("vendor")
    version = next(folder for folder in vendor.iterdir() if folder.name.startswith("swagger-ui"))
    return version.joinpath(name).read_bytes()


def facts(context: Context) -> dict[str, Any]:
    """What `/info` tells."""
    service, spec = context.service, context.service.model.spec
    pooling = "splade" if spec.is_splade else "+".join(POOLING_NAMES.get(mode, mode) for mode in spec.pooling)
    return {
        "model_id": context.model.model_id,
        "model_sha": context.model.revision,
        "model_dtype": service.backend.dtype,
        "served_model_name": context.served_name,
        "model_type": {"embedding": {"pooling": pooling}},
        "max_concurrent_requests": service.config.max_concurrent_requests,
        "max_input_length": service.model.reader.max_input_length,
        "max_batch_tokens": service.config.max_batch_tokens,
        "max_batch_requests": service.config.max_batch_requests,
        "max_client_batch_size": context.server.max_client_batch_size,
        "auto_truncate": service.config.auto_truncate,
        "tokenization_workers": service.workers,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "hybridtei": {
            "outputs": sorted(spec.heads),
            "dimensions": {"dense": spec.dense_width, "multivector": spec.multivector and spec.multivector.dim},
            "prompts": dict(spec.prompts or {}),
            "sparse_idf": spec.sparse is not None and spec.sparse.idf and not spec.is_splade,
            "backend": service.backend.name,
            "budget_tokens": service.budget_tokens,
            "lanes": service.backend.lanes,
        },
    }


ROUTES = (health, info, metrics, openapi, docs, docs_file)
PUBLIC = (health, metrics, openapi, docs, docs_file)
