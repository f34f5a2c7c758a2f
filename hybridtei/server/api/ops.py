"""Health, facts, metrics and documentation."""

from __future__ import annotations

import time
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from litestar import MediaType, Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.response import Redirect
from litestar.response.base import ASGIResponse

from hybridtei import __version__
from hybridtei.batch import EMBEDDINGS, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.server.api.openai import ModelItem, ModelList
from hybridtei.server.context import Context
from hybridtei.server.http.edge import ALIAS, PAGE
from hybridtei.server.http.errors import StatusOnly
from hybridtei.server.openapi import document
from hybridtei.server.routing import context_of, models_of, server_of, told

JSON = "application/json"
STARTED = int(time.time())
POOLING_NAMES = {"lasttoken": "last_token"}
DOCS_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
DOCS_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>hybridtei</title><link rel="stylesheet" href="swagger-ui.css"></head>
<body><div id="docs"></div><script src="swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "../api-doc/openapi.json", dom_id: "#docs"})</script></body></html>
"""


@get(["/", "/health", "/ping"])
async def health(request: Request[Any, Any, Any]) -> Response[bytes]:
    """200 without a body, or 503."""
    await context_of(request.scope).service.check_health()
    return StatusOnly(200)


@get("/info")
async def info(request: Request[Any, Any, Any]) -> ASGIResponse:
    """TEI's keys in TEI's order, then ours."""
    return told(request.scope, facts(context_of(request.scope)))


@get(["/models", "/v1/models"])
async def models(request: Request[Any, Any, Any]) -> ASGIResponse:
    """As OpenAI lists them; at `/models` as infinity does, whose client takes no other owner than itself."""
    infinity = request.scope["path"] == "/models"
    data = [_listed(context, infinity=infinity) for context in models_of(request.scope).ready]
    return told(request.scope, ModelList("list", data))


def _listed(context: Context, *, infinity: bool) -> ModelItem:
    name = context.served_name
    if not infinity:
        return ModelItem(name, "model", STARTED, owned_by="hybridtei")
    return ModelItem(
        name, "model", STARTED, stats={}, backend=context.service.backend.name, capabilities=capabilities(context.heads)
    )


def capabilities(heads: frozenset[Head]) -> list[str]:
    """In infinity's words."""
    found = ["embed"] * bool(heads & EMBEDDINGS)
    ranks = Head.SCORES in heads or Head.MULTIVECTOR in heads or {Head.DENSE, Head.SPARSE} <= heads
    return [*found, *["rerank"] * ranks, *["classify"] * (Head.SCORES in heads)]


@get("/metrics")
async def metrics(request: Request[Any, Any, Any]) -> ASGIResponse:
    models, alias = models_of(request.scope), request.scope.get(ALIAS)
    body = (models.metrics() if alias is None else models.named(str(alias)).registry.text()).encode()
    return ASGIResponse(body=body, headers={"content-type": "text/plain; charset=utf-8"})


@get("/api-doc/openapi.json")
async def openapi(request: Request[Any, Any, Any]) -> ASGIResponse:
    return ASGIResponse(body=_document(server_of(request.scope).only_tei_routes), media_type=JSON)


@get("/docs")
async def docs() -> Redirect:
    return Redirect("/docs/", status_code=303)


@get("/docs/{name:path}", media_type=MediaType.HTML)
async def docs_file(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Swagger UI, from the package that carries it: it works without a network."""
    name = str(request.path_params["name"]).strip("/")
    if name in ("", "index.html"):
        return Response(DOCS_PAGE.encode(), media_type=MediaType.HTML)
    if name not in DOCS_FILES:
        raise NotFoundException
    return Response(_swagger_ui(name), media_type=DOCS_FILES[name])


@cache
def _document(only_tei: bool) -> bytes:
    return orjson.dumps(document(only_tei=only_tei))


@cache
def _swagger_ui(name: str) -> bytes:
    vendor = files("swagger_ui_bundle").joinpath("vendor")
    version = next(folder for folder in vendor.iterdir() if folder.name.startswith("swagger-ui"))
    return version.joinpath(name).read_bytes()


def facts(context: Context) -> dict[str, Any]:
    """What `/info` tells."""
    service, spec = context.service, context.service.model.spec
    return {
        "model_id": context.model.model_id,
        "model_sha": context.model.revision,
        "model_dtype": service.backend.dtype,
        "served_model_name": context.served_name,
        "model_type": _model_type(spec),
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
            "role": spec.kind,
            "outputs": sorted(spec.heads),
            "dimensions": {"dense": spec.dense_width or None, "multivector": spec.multivector and spec.multivector.dim},
            "prompts": dict(spec.prompts or {}),
            "sparse_idf": spec.sparse is not None and spec.sparse.idf and not spec.is_splade,
            "activation": spec.activation,
            "backend": service.backend.name,
            "budget_tokens": service.budget_tokens,
            "lanes": list(service.backend.lanes),
        },
    }


def _model_type(spec: ModelSpec) -> dict[str, Any]:
    """TEI knows no taggers: to it they are classifiers."""
    if spec.kind == "embedding":
        pooling = "splade" if spec.is_splade else "+".join(POOLING_NAMES.get(mode, mode) for mode in spec.pooling)
        return {"embedding": {"pooling": pooling}}
    labels = {
        "id2label": {str(number): label for number, label in enumerate(spec.labels)},
        "label2id": {label: number for number, label in enumerate(spec.labels)},
    }
    return {"reranker" if spec.kind == "reranker" else "classifier": labels}


GUARDED = (info,)
OURS = (models,)  # guarded, too
PUBLIC = (health, metrics, openapi, docs, docs_file)


TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}
INDEX = "index.html"
FOLDER = files("hybridtei.server").joinpath("page")
FILES = sorted(file.name for file in FOLDER.iterdir() if file.name.rpartition(".")[2] in TYPES)


@get([PAGE, *(f"{PAGE}/{name}" for name in FILES if name != INDEX)])
async def page(request: Request[Any, Any, Any]) -> ASGIResponse:
    """The page itself, or a file that it loads."""
    name = request.scope["path"].removeprefix(PAGE).strip("/") or INDEX
    return ASGIResponse(body=_read(name), media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)


@cache
def _read(name: str) -> bytes:
    return FOLDER.joinpath(name).read_bytes()


ROUTES = (page,)
