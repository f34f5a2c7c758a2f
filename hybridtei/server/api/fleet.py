"""Loading and unloading models at run time, and the list of those there are."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


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
