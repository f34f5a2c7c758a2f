"""What an open-source Qdrant server sends to the service that embeds for it, and what it reads.

Such a server has `inference: {address, timeout, token}` in its configuration, and asks for every `Document` in an upsert (then
`inference` is "update") or a query ("search"). Answers are matched to inputs by place.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Vector = Literal["dense", "sparse", "multivector"]
VECTORS: tuple[Vector, ...] = ("dense", "sparse", "multivector")


class InferenceInput(Struct, frozen=True, kw_only=True):
    """One document, and the model it is for."""

    data: Any
    data_type: str = "text"
    model: Annotated[
        str, Meta(description="A model, its only or its dense vector: ALIAS; or ALIAS/dense, ALIAS/sparse, ALIAS/multivector.")
    ] = ""
    options: Annotated[
        dict[str, Any] | None,
        Meta(description="`vector`: dense, sparse, multivector; `dimensions`; `input_type`: query, document; `prompt_name`."),
    ] = None


class InferenceRequest(Struct, frozen=True, kw_only=True):
    """`/qdrant/inference`."""

    inputs: Annotated[list[InferenceInput], Meta(max_length=100_000)]
    inference: Annotated[str | None, Meta(description="update: the inputs are documents; search: they are queries.")] = None
    token: Annotated[str | None, Meta(description="The API key, for lack of a header.")] = None


class InferenceTokens(Struct, frozen=True):
    """What one model read."""

    tokens: int


class InferenceUsage(Struct, frozen=True):
    """By model."""

    models: dict[str, InferenceTokens]


class InferenceResponse(Struct, frozen=True):
    """One embedding an input: a list of numbers, `{"indices", "values"}`, or a list of lists."""

    embeddings: list[Any]
    usage: InferenceUsage


class InferenceError(Struct, frozen=True):
    """All that such a server reads of an error."""

    error: str
