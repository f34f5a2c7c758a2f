"""Embeddings as OpenAI's clients ask for them, Jina's and Voyage's among these, with `outputs` of ours; and as Ollama's do."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hybridtei.batch import Head
from hybridtei.errors import HybridTeiError, InvalidInput, NoInputs, UnsupportedHead
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Embeddings, Usage
from hybridtei.server.api.tei import (
    Dimensions,
    Id,
    Inputs,
    OpenAICompatUsage,
    ServedModel,
    Size,
    Truncate,
    check_inputs,
    parse_inputs,
)
from hybridtei.server.context import Context, Reply, usage_of
from hybridtei.server.http import writers
from hybridtei.server.http.writers import Pieces
from hybridtei.server.registry import EMBED
from hybridtei.server.routing import OpenAICompatErrorResponse, Route
from hybridtei.server.vectors import SPLADE_NORMALIZE, OutputDtype, Outputs, SparseFormat, heads_of, smaller_vectors
from hybridtei.tasks.embed import Embed, InputType, Precision

TASK_SIDES: dict[str, InputType] = {"retrieval.query": "query", "retrieval.passage": "document"}
JinaType = Literal["float", "base64", "binary", "ubinary"]


class JinaText(Struct, frozen=True):
    """An input as Jina's clients may wrap it."""

    text: str


class OpenAICompatRequest(Struct, frozen=True, kw_only=True):
    """`/v1/embeddings`."""

    input: Annotated[
        str | list[str | Id | list[Id] | JinaText], Meta(description="A text, a list of ids, or a list of texts and id lists.")
    ]
    model: ServedModel = None
    user: Annotated[str | None, Meta(description="Accepted and not looked at.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(description="base64: little-endian, float32 unless `output_dtype` says otherwise.")
    ] = "float"
    dimensions: Dimensions = None
    output_dimension: Annotated[Size | None, Meta(description="The same under Voyage's name.")] = None
    output_dtype: Annotated[OutputDtype, Meta(description="What numbers vectors, and their base64, are made of.")] = None
    input_type: Annotated[str | None, Meta(description="query and document matter to models that read these differently.")] = (
        None
    )
    truncation: Truncate = None
    modality: Annotated[str | None, Meta(description="Of infinity's clients, who mean no `dimensions` by 0.")] = None
    task: Annotated[
        str | None, Meta(description="Jina's `input_type`: retrieval.query, retrieval.passage; or an adapter of the model.")
    ] = None
    embedding_type: Annotated[JinaType | list[JinaType] | None, Meta(description="Jina's form of vectors; one.")] = None
    normalized: Annotated[bool | None, Meta(description="Of Jina's clients; false: as the model gives them.")] = None
    truncate: Annotated[bool | None, Meta(description="`truncation` under Jina's name.")] = None
    late_chunking: Annotated[bool | None, Meta(description="Of Jina's clients; true is refused.")] = None
    outputs: Annotated[Outputs | None, Meta(description="Ours: also give `sparse_embedding` and `multivector`.")] = None
    sparse_format: Annotated[SparseFormat, Meta(description="Ours: form of `sparse_embedding`.")] = "qdrant"

    def __post_init__(self) -> None:
        check_inputs(self.items, "input")

    @property
    def width(self) -> int | None:
        """The number of dimensions; None: all."""
        width = self.dimensions if self.output_dimension is None else self.output_dimension
        return None if width == 0 and self.modality is not None else width

    @property
    def side(self) -> InputType | None:
        """query or document; None for any other word."""
        if self.input_type is None:
            return TASK_SIDES.get(self.task or "")
        return "query" if self.input_type == "query" else "document" if self.input_type == "document" else None

    @property
    def items(self) -> Any:
        """`input`, with Jina's objects as texts."""
        if isinstance(self.input, str):
            return self.input
        return [item.text if isinstance(item, JinaText) else item for item in self.input]

    @property
    def is_base64(self) -> bool:
        return self.encoding_format == "base64" or self._jina_type == "base64"

    @property
    def precision(self) -> Precision | None:
        """The type of the numbers; None: float32."""
        return self._jina_type if self._jina_type in ("binary", "ubinary") else self.output_dtype

    @property
    def _jina_type(self) -> JinaType | None:
        form = self.embedding_type
        return (form[0] if form else None) if isinstance(form, list) else form

    def check(self) -> None:
        """Raises InvalidInput for what Jina offers and we do not."""
        if self.late_chunking:
            raise InvalidInput("`late_chunking` is true, but each input is embedded by itself here")
        if isinstance(self.embedding_type, list) and len(self.embedding_type) > 1:
            raise InvalidInput(f"`embedding_type` names {len(self.embedding_type)} forms, but one can be given")


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


@handler("openai_embed")
async def openai_embed(context: Context, request: OpenAICompatRequest) -> Reply:
    """`/v1/embeddings`: normalised, unless Jina's `normalized` is false."""
    with context.counting_failures():
        request.check()
    inputs = parse_inputs(request.items)
    refusal: HybridTeiError | None = foreign_ids(context, inputs) or unknown_task(context, request.task)
    if context.is_splade and request.outputs is None:
        refusal = UnsupportedHead(SPLADE_NORMALIZE)
    heads = heads_of(context, request.outputs or ["dense"]) | ({Head.DENSE} & context.heads)  # the wire needs `embedding`
    width = request.width
    task = Embed(
        inputs.items,
        heads,
        context.truncate(request.truncate if request.truncation is None else request.truncation),
        prompt_name=None if context.adapters is None else request.task,
        normalize=request.normalized is not False,
        dimensions=width,
        input_type=request.side,
    )
    smaller = smaller_vectors(context, heads, request.precision, width)
    pieces = context.service.tokenizer.pieces

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        answer = smaller(answer)
        data = [_item(answer, i, request, pieces) for i in range(len(answer))]
        return {"object": "list", "data": data, "model": context.served_name, "usage": usage_of(usage)}

    return await context.embed(task, inputs, write, refusal=refusal)


def foreign_ids(context: Context, inputs: Inputs) -> InvalidInput | None:
    """Why lists of ids are refused that are not of this model's vocabulary. What else they hold is nonsense, too."""
    size = context.service.tokenizer.vocab_size
    largest = max((max(item, default=0) for item in inputs.items if not isinstance(item, str)), default=0)
    if largest < size:
        return None
    return InvalidInput(
        f"`input` holds the id {largest}, but the vocabulary ends at {size - 1}. LangChain's OpenAIEmbeddings sends ids of "
        "OpenAI's vocabulary, which mean nothing here: create it with `check_embedding_ctx_length=False`"
    )


def unknown_task(context: Context, task: str | None) -> InvalidInput | None:
    """Why a model with adapters refuses a task; others only ask whether it means queries or documents."""
    adapters = context.adapters
    if task is None or adapters is None or task in adapters.names:
        return None
    return InvalidInput(f"`task` names no adapter of the model, which has: {', '.join(adapters.names)}")


def _item(answer: Embeddings, i: int, request: OpenAICompatRequest, pieces: Pieces) -> dict[str, Any]:
    item: dict[str, Any] = {"object": "embedding"}
    if answer.dense is not None:
        row = answer.dense[i]
        item["embedding"] = writers.as_base64(row) if request.is_base64 else row
    if answer.sparse is not None:
        item["sparse_embedding"] = writers.sparse(answer.sparse, i, request.sparse_format, pieces)
    if answer.multivector is not None:
        item["multivector"] = answer.multivector.row(i)
    item["index"] = i
    return item


OPENAI = Route(
    path="/v1/embeddings",
    handler=openai_embed,
    request=OpenAICompatRequest,
    response=OpenAICompatResponse,
    summary="OpenAI embeddings",
    capability=EMBED,
    error=OpenAICompatErrorResponse,
    is_tei=True,
    needs_content_type=False,
)
ROUTES = (OPENAI, replace(OPENAI, path="/embeddings", summary="", needs_content_type=True))


class OllamaEmbedRequest(Struct, frozen=True, kw_only=True):
    """`/api/embed`."""

    input: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    model: ServedModel = None
    truncate: Annotated[bool | None, Meta(description="Cut what is too long [default, as Ollama's: true].")] = None
    dimensions: Dimensions = None


class OllamaEmbedResponse(Struct, frozen=True):
    """Answer of `/api/embed`; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


async def ollama_embed(context: Context, request: OllamaEmbedRequest) -> Reply:
    """`/api/embed`: of unit length, and a list even for one text; what is too long is cut unless `truncate` is false."""
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts:
        raise NoInputs("`input` cannot be empty")
    inputs = Inputs([*texts], is_batch=True)
    heads = frozenset({Head.DENSE})
    task = Embed(inputs.items, heads, truncate=request.truncate is not False, dimensions=request.dimensions)
    refusal = UnsupportedHead(SPLADE_NORMALIZE) if context.is_splade else None
    began_ns = perf_counter_ns()

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        assert answer.dense is not None
        return {
            "model": context.served_name,
            "embeddings": answer.dense,
            "total_duration": perf_counter_ns() - began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.tokens,
        }

    field = None if isinstance(request.input, str) else "input"
    return await context.embed(task, inputs, write, refusal=refusal, field=field)


OLLAMA_ROUTES = (
    Route(
        path="/api/embed",
        handler=ollama_embed,
        request=OllamaEmbedRequest,
        response=OllamaEmbedResponse,
        summary="Ollama embeddings",
        capability=EMBED,
        needs_content_type=False,
    ),
)
