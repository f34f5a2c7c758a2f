"""Our own requests: several outputs of one forward pass in one answer.

They refuse fields that they do not know: an option whose name is misspelled would be left out without a word.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei.server.api.tei import EmbedAllRequest, Size, SparseValue
from hybridtei.tasks.quantize import Precision

Output = Literal["dense", "sparse", "multivector"]
Outputs = Annotated[list[Output], Meta(min_length=1)]
SparseFormat = Literal["tei", "qdrant", "tokens"]
OutputDtype = Annotated[
    Precision | None,
    Meta(description="What numbers vectors are made of; binary: one bit each, eight in an int8, ubinary: in a uint8."),
]


ModelName = Annotated[str | None, Meta(description="Which of several models embeds [default: the first that can].")]
Side = Annotated[
    Literal["query", "document"] | None,
    Meta(description="What the inputs are, for models that read queries otherwise than documents [default: document]."),
]


class EmbedHybridRequest(EmbedAllRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/embed_hybrid`."""

    outputs: Annotated[Outputs | None, Meta(description="Which vectors to give [default: all that the model has].")] = None
    normalize: Annotated[bool, Meta(description="Scale dense vectors to length 1; multi-vectors always are.")] = True
    dimensions: Annotated[
        Size | None, Meta(description="Keep the first so many dimensions of dense vectors, and of wider multi-vectors.")
    ] = None
    sparse_format: Annotated[
        SparseFormat,
        Meta(description="tei: list of {index, value}; qdrant: {indices, values}; tokens: {vocabulary piece: weight}."),
    ] = "tei"
    output_dtype: OutputDtype = None
    input_type: Side = None
    model: ModelName = None


class EmbedMultivectorRequest(EmbedAllRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/embed_multivector`."""

    dimensions: Annotated[Size | None, Meta(description="Keep the first so many dimensions of each vector.")] = None
    output_dtype: OutputDtype = None
    input_type: Side = None
    model: ModelName = None


class HybridEmbedding(Struct, frozen=True, omit_defaults=True):
    """All wanted vectors of one input."""

    dense: list[float] | None = None
    sparse: Annotated[
        list[SparseValue] | dict[str, Any] | None, Meta(description="As `sparse_format` says: list, or object.")
    ] = None
    multivector: list[list[float]] | None = None
