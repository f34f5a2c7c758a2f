"""OpenAI's embeddings request and answer, with `outputs` of ours."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hybridtei.server.wire.hybrid import OutputDtype, Outputs, SparseFormat
from hybridtei.server.wire.tei import RawInputs, Size
from hybridtei.tasks.embed import InputType


class OpenAICompatRequest(Struct, frozen=True, kw_only=True):
    """`/v1/embeddings`."""

    input: Annotated[RawInputs, Meta(description="A text, a list of ids, or a list of texts and id lists.")]
    model: Annotated[str | None, Meta(description="Which model is to answer, where there are several.")] = None
    user: Annotated[str | None, Meta(description="Accepted and not looked at.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(description="base64: little-endian, float32 unless `output_dtype` says otherwise.")
    ] = "float"
    dimensions: Annotated[Size | None, Meta(description="Keep the first so many dimensions.")] = None
    output_dimension: Annotated[Size | None, Meta(description="The same under Voyage's name.")] = None
    output_dtype: Annotated[OutputDtype, Meta(description="What numbers vectors, and their base64, are made of.")] = None
    input_type: Annotated[str | None, Meta(description="query and document matter to models that read these differently.")] = (
        None
    )
    truncation: Annotated[bool | None, Meta(description="Cut what is too long [default: the server's auto_truncate].")] = None
    modality: Annotated[str | None, Meta(description="Of infinity's clients, who mean no `dimensions` by 0.")] = None
    outputs: Annotated[Outputs | None, Meta(description="Ours: also give `sparse_embedding` and `multivector`.")] = None
    sparse_format: Annotated[SparseFormat, Meta(description="Ours: form of `sparse_embedding`.")] = "qdrant"

    @property
    def width(self) -> int | None:
        """How many dimensions are wanted."""
        wanted = self.dimensions if self.output_dimension is None else self.output_dimension
        return None if wanted == 0 and self.modality is not None else wanted

    @property
    def side(self) -> InputType | None:
        """Other words say nothing to us."""
        return "query" if self.input_type == "query" else "document" if self.input_type == "document" else None


class OpenAICompatUsage(Struct, frozen=True):
    """Tokens that ran, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class OpenAICompatEmbedding(Struct, frozen=True):
    """One input's vectors."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class OpenAICompatResponse(Struct, frozen=True):
    """Answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[OpenAICompatEmbedding]
    model: str
    usage: OpenAICompatUsage


class OpenAICompatErrorResponse(Struct, frozen=True):
    """Errors of `/v1/embeddings`, flat as TEI's."""

    message: str
    code: int
    type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class ErrorDetail(Struct, frozen=True):
    """What was wrong, as clients of FastAPI servers read it."""

    loc: list[str]
    msg: str
    type: str


class ListedErrorResponse(OpenAICompatErrorResponse, frozen=True, kw_only=True):
    """Errors of reranking, scoring and classification beside TEI's routes."""

    detail: list[ErrorDetail]


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
