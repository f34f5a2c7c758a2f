"""Models that come and go while the server runs: behind the API key, since whoever may load a model may fill the memory."""

from __future__ import annotations

import msgspec

from hybridtei.config import ModelConfig, NamedModel
from hybridtei.errors import HybridTeiError, InvalidInput, LoadError
from hybridtei.model_list import named_model
from hybridtei.server.context import Context, Reply
from hybridtei.server.errors import tei_error
from hybridtei.server.models import Entry, Models
from hybridtei.server.serve import managed
from hybridtei.server.wire.fleet import ModelState, Table, UnloadRequest

# Settings of a process, not of one model in it.
NOT_HERE = frozenset({"hf_token", "huggingface_hub_cache", "trust_remote_code"})


async def load(models: Models, default: Context, request: Table) -> Reply:
    """`/models/load`: answers when the model does, or cannot. Raises InvalidInput."""
    try:
        return Reply(_state(await models.load(_configuration(request, default.model))))
    except LoadError as error:
        raise InvalidInput(str(error)) from error


async def unload(models: Models, default: Context, request: UnloadRequest) -> Reply:
    """`/models/unload`: answers once its memory is free. Raises UnknownModel, InvalidInput."""
    await models.unload(request.model)
    return Reply(ModelState(request.model, "unloaded"))


def _state(entry: Entry) -> ModelState:
    return ModelState(entry.alias, entry.state, entry.seconds, entry.error)


def _configuration(table: Table, like: ModelConfig) -> NamedModel:
    refused = sorted(NOT_HERE & table.keys())
    if refused:
        raise InvalidInput(f"`{refused[0]}` is set for the whole process, when it starts")
    flags = msgspec.structs.replace(
        ModelConfig(),
        hf_token=like.hf_token,
        huggingface_hub_cache=like.huggingface_hub_cache,
        offline=like.offline,
        trust_remote_code=like.trust_remote_code,
    )
    try:
        return named_model(table, flags, "model")
    except LoadError as error:
        raise InvalidInput(str(error)) from None


ERRORS = {HybridTeiError: tei_error}
ROUTES = (
    managed("/models/load", Table, load, errors=ERRORS),
    managed("/models/unload", UnloadRequest, unload, errors=ERRORS),
)
