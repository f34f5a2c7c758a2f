"""Health, facts, metrics and documentation; the models there are, and how they are loaded and unloaded at run time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei import __version__
from hybridtei.batch import EMBEDDINGS, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import ModelConfig, NamedModel
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.load import named_model
from hybridtei.server.api.tei import Info
from hybridtei.server.context import Context, Reply
from hybridtei.server.registry import ANY, Entry, Models
from hybridtei.server.routing import ALIAS, PAGE, Content, Route


class ModelItem(Struct, frozen=True, omit_defaults=True):
    """A served model; at `/models` with what infinity's client looks for, at `/v1/models` with an owner."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str | None = None
    stats: dict[str, float] | None = None
    backend: str | None = None
    capabilities: list[str] | None = None


class ModelList(Struct, frozen=True):
    """Answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelItem]


STARTED = int(time.time())
FINGERPRINT_WAIT_S = 0.5  # of the first requests; half a gigabyte is read meanwhile
POOLING_NAMES = {"lasttoken": "last_token"}


async def health(scope: Any) -> Content:
    """200 without a body, or 503."""
    await _context_of(scope).service.check_health()
    return Content()


async def info(scope: Any) -> Reply:
    """TEI's keys in TEI's order, then ours: `fingerprint` is null while the weights are read for it; `store`: whether there
    is a vector store."""
    context = _context_of(scope)
    answer = facts(context)
    reading = asyncio.wrap_future(context.fingerprint)
    await asyncio.wait([reading], timeout=FINGERPRINT_WAIT_S)
    answer["hybridtei"]["fingerprint"] = reading.result() if reading.done() else None
    answer["hybridtei"]["store"] = scope["app"].state.schemas is not None
    return Reply(answer)


async def models(scope: Any) -> Reply:
    """As OpenAI lists them; at `/models` as infinity does, whose client takes no other owner than itself."""
    infinity = scope["path"] == "/models"
    data = [_listed(context, infinity=infinity) for context in _models_of(scope).ready]
    return Reply(ModelList("list", data))


def _models_of(scope: Any) -> Models:
    return scope["app"].state.models  # type: ignore[no-any-return]


def _context_of(scope: Any) -> Context:
    """Of the model that the path names, or the first. Raises UnknownModel."""
    return _models_of(scope).choose(scope.get(ALIAS), None, ANY)


def _listed(context: Context, *, infinity: bool) -> ModelItem:
    name = context.served_name
    if not infinity:
        return ModelItem(name, "model", STARTED, owned_by="hybridtei")
    return ModelItem(
        name, "model", STARTED, stats={}, backend=context.service.backend.name, capabilities=capabilities(context.heads)
    )


def capabilities(heads: frozenset[Head]) -> list[str]:
    """What a model can do, in infinity's words."""
    names = ["embed"] * bool(heads & EMBEDDINGS)
    ranks = Head.SCORES in heads or Head.MULTIVECTOR in heads or {Head.DENSE, Head.SPARSE} <= heads
    return [*names, *["rerank"] * ranks, *["classify"] * (Head.SCORES in heads)]


async def metrics(scope: Any) -> Content:
    """Prometheus' text, of the model that the path names, or of all."""
    models, alias = _models_of(scope), scope.get(ALIAS)
    text = models.metrics() if alias is None else models.named(str(alias)).registry.text()
    return Content(text.encode(), "text/plain; charset=utf-8")


async def openapi(scope: Any) -> Content:
    """OpenAPI's document, which the application makes of its routes."""
    return Content(scope["app"].state.openapi(), "application/json")


async def docs(scope: Any) -> Content:
    """Redirect to `/docs/`, where relative links work."""
    return Content(media_type="text/plain; charset=utf-8", status=303, headers=[(b"location", b"/docs/")])


def facts(context: Context) -> dict[str, Any]:
    """The fields of `/info`."""
    service, spec = context.service, context.service.model.spec
    return {
        "model_id": context.model.model_id,
        "model_sha": context.model.revision,
        "model_dtype": service.backend.dtype,
        "served_model_name": context.served_name,
        "model_type": _model_type(spec),
        "max_concurrent_requests": service.config.max_concurrent_requests,
        "max_input_length": service.reader.max_input_length,
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
            "adapters": [] if spec.adapters is None else list(spec.adapters.names),
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


TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
PAGE_POLICY = POLICY + "require-trusted-types-for 'script'"
DOCS_POLICY = POLICY + "img-src 'self' data:"  # Swagger UI writes markup, and its style sheet holds pictures
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
]
INDEX = "index.html"
FOLDER = files("hybridtei.server").joinpath("page")
FILES = sorted(file.name for file in FOLDER.iterdir() if file.name.rpartition(".")[2] in TYPES)
DOCS_FILES = sorted(file.name for file in FOLDER.joinpath("docs").iterdir() if file.name.rpartition(".")[2] in TYPES)


async def page(scope: Any) -> Content:
    """The page itself, or a file that it loads."""
    return _content(scope["path"].removeprefix(PAGE).strip("/") or INDEX, PAGE_POLICY)


async def docs_file(scope: Any) -> Content:
    """Swagger UI, or a file that it loads."""
    name = str(scope["path_params"]["name"]).strip("/")
    return _content(f"docs/{name}", DOCS_POLICY) if name in DOCS_FILES else Content(status=404)


@cache
def _content(name: str, policy: str) -> Content:
    headers = [(b"content-security-policy", policy.encode()), *HEADERS]
    return Content(FOLDER.joinpath(name).read_bytes(), TYPES[name.rpartition(".")[2]], headers=headers)


HEALTH = Route(method="GET", path="/health", handler=health, summary="Health check", role=None, is_tei=True)
MODELS = Route(
    method="GET",
    path="/v1/models",
    handler=models,
    response=ModelList,
    summary="The models",
    role="any",
    needs_content_type=False,
)
ROUTES = (
    HEALTH,
    replace(HEALTH, path="/", summary=""),
    replace(HEALTH, path="/ping", summary=""),
    Route(method="GET", path="/info", handler=info, response=Info, summary="The model and the limits", role="any", is_tei=True),
    replace(HEALTH, path="/metrics", handler=metrics, summary="Prometheus metrics"),
    replace(HEALTH, path="/api-doc/openapi.json", handler=openapi, summary=""),
    replace(HEALTH, path="/docs", handler=docs, summary=""),
    replace(HEALTH, path="/docs/{name:path}", handler=docs_file, summary=""),
    replace(MODELS, path="/models", summary="The models, with what infinity's clients look for"),
    MODELS,
    *(
        Route(method="GET", path=path, handler=page, role=None)
        for path in (PAGE, *(f"{PAGE}/{name}" for name in FILES if name != INDEX))
    ),
)


class UnloadRequest(Struct, frozen=True):
    """`/models/unload`."""

    model: Annotated[str, Meta(description="Alias of the model to unload.")]


class ModelState(Struct, frozen=True, omit_defaults=True):
    """What became of a model."""

    model: str
    state: Annotated[str, Meta(description="loading, ready, failed or unloading.")]
    seconds: float | None = None
    error: str | None = None


Table = dict[str, Any]  # the keys of `config.NamedModel`


# Settings of a process, not of one model in it; and a file that lies outside of the model, of which a request may name none.
OF_PROCESS = frozenset({"hf_token", "huggingface_hub_cache", "trust_remote_code", "quantization_ranges"})


async def load(models: Models, alias: str | None, request: Table) -> Reply:
    """`/models/load`: answers when the model does, or cannot. Raises InvalidInput."""
    try:
        return Reply(_state(await models.load(_configuration(request, models.flags))))
    except LoadError as error:
        raise InvalidInput(str(error)) from error


async def unload(models: Models, alias: str | None, request: UnloadRequest) -> Reply:
    """`/models/unload`: answers once its memory is free. Raises UnknownModel, InvalidInput."""
    await models.unload(request.model)
    return Reply(ModelState(request.model, "unloaded"))


def _state(entry: Entry) -> ModelState:
    return ModelState(entry.alias, entry.state, entry.seconds, entry.error)


def _configuration(table: Table, flags: ModelConfig) -> NamedModel:
    """`flags`: of the process. What they forbid, no request allows. Raises InvalidInput."""
    refused = sorted(OF_PROCESS & table.keys())
    if flags.offline and table.get("offline") is False:
        refused = ["offline"]
    if refused:
        raise InvalidInput(f"`{refused[0]}` is set for the whole process, when it starts")
    base = ModelConfig(
        hf_token=flags.hf_token,
        huggingface_hub_cache=flags.huggingface_hub_cache,
        offline=flags.offline,
        trust_remote_code=flags.trust_remote_code,
    )
    try:
        return named_model(table, base, "model")
    except LoadError as error:
        raise InvalidInput(str(error)) from None


MANAGEMENT_ROUTES = (
    Route(
        path="/models/load",
        handler=load,
        request=Table,
        target="models",
        role="manage",
        takes_permits=False,
        needs_content_type=False,
        outlives_client=True,
    ),
    Route(
        path="/models/unload",
        handler=unload,
        request=UnloadRequest,
        target="models",
        role="manage",
        takes_permits=False,
        needs_content_type=False,
        outlives_client=True,
    ),
)
