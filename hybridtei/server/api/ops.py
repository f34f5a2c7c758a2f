"""Health, facts and metrics; listing, loading and unloading of models."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei import __version__
from hybridtei.batch import EMBEDDINGS, Head
from hybridtei.config import ModelConfig, NamedModel
from hybridtei.errors import InvalidInput, LoadError, Unhealthy
from hybridtei.inference.load import named_model
from hybridtei.models.checkpoint.kinds import Labels
from hybridtei.models.checkpoint.rankers import template_source
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.server.api.tei import Info
from hybridtei.server.context import NOTHING, Context, Reply
from hybridtei.server.models import Models
from hybridtei.server.routing import get, post
from hybridtei.server.serve import HttpRequest
from hybridtei.server.wires import ListedErrorResponse, Wire


class ModelItem(Struct, frozen=True):
    """A served model, with the fields that clients of OpenAI, infinity, vLLM (`max_model_len`) and
    OpenRouter (`context_length`) need: the tokens of an input."""

    id: str
    object: Literal["model"]
    created: int
    # infinity's client takes no other name
    owned_by: Literal["infinity"]
    stats: dict[str, float]
    backend: str
    capabilities: list[str]
    max_model_len: int
    context_length: int


class ModelList(Struct, frozen=True):
    """Answer of `/v1/models` and `/models`."""

    object: Literal["list"]
    data: list[ModelItem]


LISTS = Wire(tried="openai, infinity_client, litellm, Open WebUI", error=ListedErrorResponse)
STARTED = int(time.time())
# Seconds that the first requests wait; half a gigabyte is read in this time
FINGERPRINT_WAIT_S = 0.5
POOLING_NAMES = {"lasttoken": "last_token"}


@get("/health", role=None, is_tei=True)
@get("/ping", in_schema=False, role=None, is_tei=True)
async def health(context: Context, request: HttpRequest) -> Reply:
    """Health check."""
    if request.shared.models.leaving:
        raise Unhealthy
    await context.service.check_health()
    return NOTHING


@get("/metrics", role=None, source="models", is_tei=True)
async def metrics(models: Models, request: HttpRequest) -> Reply:
    """Prometheus metrics."""
    if request.alias is None:
        text = models.metrics()
    else:
        text = models.named(request.alias).registry.text()
    return Reply(text.encode(), media_type=b"text/plain; charset=utf-8")


@get("/info", Info, is_tei=True)
async def info(context: Context, request: HttpRequest) -> Reply:
    """The model and the limits. `fingerprint` is null until the weights have been read."""
    answer = facts(context)
    reading = asyncio.wrap_future(context.fingerprint)
    await asyncio.wait([reading], timeout=FINGERPRINT_WAIT_S)
    answer["hybridtei"]["fingerprint"] = reading.result() if reading.done() else None
    answer["hybridtei"]["store"] = request.shared.schemas is not None
    return Reply(answer)


@get(["/v1/models", "/models"], ModelList, source="models", wire=LISTS)
async def list_models(models: Models, request: HttpRequest) -> Reply:
    """The models."""
    return Reply(ModelList("list", [*map(_listed, models.listed())]))


@get("/v1/models/{name:path}", ModelItem, source="models", in_schema=False, wire=LISTS)
async def retrieve_model(models: Models, request: HttpRequest) -> Reply:
    """One model, by its name."""
    name = request.scope["path_params"]["name"].strip("/")
    return Reply(_listed(models.named(name)))


def _listed(context: Context) -> ModelItem:
    backend, able = context.service.backend.name, capabilities(context.heads)
    if context.service.model.spec.role == "classifier":
        able = ["classify"]
    length = context.service.reader.max_input_length
    return ModelItem(
        context.served_name, "model", STARTED, "infinity", {}, backend, able, length, length
    )


def capabilities(heads: frozenset[Head]) -> list[str]:
    """A model's capabilities, under infinity's names."""
    names = ["embed"] * bool(heads & EMBEDDINGS)
    ranks = Head.SCORES in heads or Head.MULTIVECTOR in heads or {Head.DENSE, Head.SPARSE} <= heads
    return [*names, *["rerank"] * ranks, *["classify"] * (Head.SCORES in heads)]


def facts(context: Context) -> dict[str, Any]:
    """The fields of `/info`: TEI's keys in TEI's order, then ours."""
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
            "role": spec.role,
            "outputs": sorted(spec.heads),
            "dimensions": {
                "dense": spec.dense_width or None,
                "sparse": spec.sparse_width if Head.SPARSE in spec.heads else None,
                "multivector": spec.multivector_width or None,
            },
            "prompts": dict(spec.prompts or {}),
            "adapters": [] if spec.adapters is None else list(spec.adapters.names),
            "encoding_formats": ["float", "base64"],
            "sparse_idf": spec.sparse_idf,
            "activation": spec.kind.activation if isinstance(spec.kind, Labels) else None,
            "template": template_source(spec.folder, spec.kind.template),
            "backend": service.backend.name,
            "budget_tokens": service.budget_tokens,
            "lanes": list(service.backend.lanes),
            "long_inputs": context.server.long_inputs,
            "max_split_texts": context.server.max_split_texts,
        },
    }


def _model_type(spec: ModelSpec) -> dict[str, Any]:
    """The model's type for TEI's clients. TEI has no taggers, so they are classifiers."""
    if spec.role == "embedding":
        modes = ("splade",) if spec.is_splade else spec.pooling
        pooling = "+".join(POOLING_NAMES.get(mode, mode) for mode in modes)
        return {"embedding": {"pooling": pooling}}
    labels = {
        "id2label": {str(number): label for number, label in enumerate(spec.labels)},
        "label2id": {label: number for number, label in enumerate(spec.labels)},
    }
    return {"reranker" if spec.role == "reranker" else "classifier": labels}


class UnloadRequest(Struct, frozen=True):
    """Request of `/models/unload`."""

    model: Annotated[str, Meta(description="Alias of the model to unload.")]


class ModelState(Struct, frozen=True, omit_defaults=True):
    """The state of a model after loading or unloading."""

    model: str
    state: Annotated[str, Meta(description="loading, ready, failed or unloading.")]
    seconds: float | None = None
    error: str | None = None


MANAGED = {
    "source": "models",
    "span": None,
    "in_schema": False,
    "role": "manage",
    "takes_permits": False,
    "outlives_client": True,
}
# Keys of `config.NamedModel`
Table = dict[str, Any]
# Settings of the whole process, and a file outside the model's folder: a request may set none of
# them.
OF_PROCESS = frozenset(
    {"hf_token", "huggingface_hub_cache", "trust_remote_code", "quantization_ranges"}
)


@post("/models/load", Table, ModelState, **MANAGED)
async def load(models: Models, request: Table) -> Reply:
    """Load a model, and answer when it is ready or has failed."""
    try:
        entry = await models.load(_configuration(request, models.flags))
    except LoadError as error:
        raise InvalidInput(str(error)) from error
    return Reply(ModelState(entry.alias, entry.state, entry.seconds, entry.error))


@post("/models/unload", UnloadRequest, ModelState, **MANAGED)
async def unload(models: Models, request: UnloadRequest) -> Reply:
    """Unload a model, and answer once its memory is free."""
    await models.unload(request.model)
    return Reply(ModelState(request.model, "unloaded"))


def _configuration(table: Table, flags: ModelConfig) -> NamedModel:
    """The configuration of a request. A request cannot allow what the process's `flags` forbid.
    Raises InvalidInput."""
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
