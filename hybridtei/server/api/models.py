"""Loading and unloading models at run time, and the list of those there are."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from hybridtei.config import ModelConfig, NamedModel
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.model_list import named_model
from hybridtei.server.context import Reply
from hybridtei.server.registry import Entry, Models
from hybridtei.server.routing import Route


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


ROUTES = (
    Route(
        path="/models/load",
        handler=load,
        request=Table,
        target="models",
        role="manage",
        needs_content_type=False,
        outlives_client=True,
    ),
    Route(
        path="/models/unload",
        handler=unload,
        request=UnloadRequest,
        target="models",
        role="manage",
        needs_content_type=False,
        outlives_client=True,
    ),
)
