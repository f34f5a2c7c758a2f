"""OpenAI's embedding API with Jina's and Voyage's fields; the fields `outputs` and `sparse_format`
are hybridtei's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput, UnsupportedHead
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.pooling import Precision
from hybridtei.inference.tasks.spans import MAX_CHUNKS, EmbedSpans, joined
from hybridtei.models.text.reader import Input
from hybridtei.options import (
    Dimensions,
    Direction,
    EmbedOptions,
    Long,
    Size,
    Truncate,
)
from hybridtei.outputs import Embeddings, Usage
from hybridtei.server import answers
from hybridtei.server.answers import Pieces
from hybridtei.server.api.tei import (
    DIRECTIONS,
    NOT_EMPTY,
    SIDES,
    CutSide,
    FullText,
    Id,
    Ids,
    OpenAICompatUsage,
    PromptTokens,
    ServedModel,
    check_inputs,
    parse_inputs,
)
from hybridtei.server.context import Context, Reply, usage_of
from hybridtei.server.models import EMBED
from hybridtei.server.routing import post
from hybridtei.server.vectors import (
    SPLADE_NORMALIZE,
    OutputDtype,
    Outputs,
    SparseFormat,
    as_given,
    by_text,
    check_vectors,
    embed_spans,
    heads_of,
    smaller_vectors,
)
from hybridtei.server.wires import (
    ClientsErrorResponse,
    Form,
    ListedErrorResponse,
    OpenAICompatErrorResponse,
    VoyageErrorResponse,
    Wire,
)

log = logging.getLogger(__name__)

JinaType = Literal["float", "base64", "binary", "ubinary"]
JinaTypes = Annotated[
    JinaType | Annotated[list[JinaType], Meta(max_length=1)] | None,
    Meta(description="Jina's form of vectors; older clients call it `encoding_type`."),
]
Normalized = Annotated[
    bool | None,
    Meta(description="false: do not scale to length 1; Jina's, and vLLM's `normalize`."),
]
Side = Annotated[
    str | None, Meta(description="query or document, for models that treat them differently.")
]


class JinaText(Struct, frozen=True):
    """An input in the object that Jina's clients send."""

    text: FullText


class OpenAICompatRequest(Struct, frozen=True, kw_only=True):
    """Request of `/v1/embeddings`."""

    input: Annotated[
        FullText | Annotated[list[FullText | Id | Ids | JinaText], NOT_EMPTY],
        Meta(description="A text, a list of ids, or a list of texts and id lists."),
    ]
    model: ServedModel = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"],
        Meta(description="base64: little-endian, float32 unless `output_dtype` says otherwise."),
    ] = "float"
    dimensions: Dimensions = None
    output_dimension: Annotated[
        Size | None, Meta(description="`dimensions` under Voyage's name.")
    ] = None
    output_dtype: Annotated[
        OutputDtype, Meta(description="Type of the numbers in vectors and in their base64.")
    ] = None
    input_type: Side = None
    truncation: Truncate = None
    modality: Annotated[
        Any, Meta(description="text, from infinity's clients, where `dimensions` 0 means all.")
    ] = None
    task: Annotated[
        str | None,
        Meta(
            description=(
                "Jina's `input_type`: retrieval.query, retrieval.passage; or an adapter of the "
                "model."
            )
        ),
    ] = None
    embedding_type: JinaTypes = None
    encoding_type: JinaTypes = None
    normalized: Normalized = None
    normalize: Normalized = None
    return_multivector: Form = None
    return_sparse: Form = None
    embed_dtype: Form = None
    endianness: Form = None
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        Meta(description="`truncation` under Jina's name, or the side that is cut off, NVIDIA's."),
    ] = None
    truncate_prompt_tokens: PromptTokens = None
    truncation_side: CutSide = None
    late_chunking: Annotated[
        bool | None,
        Meta(
            description=(
                "From Jina's clients; true: read the texts as the chunks of one text, in order."
            )
        ),
    ] = None
    long_inputs: Long = None
    outputs: Annotated[
        Outputs | None, Meta(description="Ours: also give `sparse_embedding` and `multivector`.")
    ] = None
    sparse_format: Annotated[
        SparseFormat, Meta(description="Ours: form of `sparse_embedding`.")
    ] = "qdrant"

    def __post_init__(self) -> None:
        check_inputs(self.input, "input")

    @property
    def options(self) -> EmbedOptions:
        """Clients of OpenAI expect vectors of length 1. TEI has this route too, and uses no default
        prompt of the checkpoint."""
        max_tokens = self.truncate_prompt_tokens
        return EmbedOptions(
            truncate=max_tokens is not None or self.cuts,
            truncation_direction=self.cut_side,
            max_tokens=max_tokens,
            normalize=self.normalized is not False,
            dimensions=self.width,
            input_type=SIDES.get(self.input_type or self.task),
            long_inputs=self.long_inputs,
            uses_default_prompt=False,
        )

    @property
    def width(self) -> int | None:
        """The number of dimensions; None: all."""
        if self.dimensions == 0 and self.modality is not None:
            return None
        return self.dimensions

    @property
    def cuts(self) -> bool | None:
        """True: cut long inputs; None: the server's default."""
        if self.truncate is None:
            return None
        is_cut = self.truncate not in (False, "NONE")
        if self.truncation is not None and self.truncation is not is_cut:
            raise InvalidInput(
                f"`truncation` is {self.truncation}, `truncate` is {self.truncate}: give one"
            )
        return is_cut

    @property
    def cut_side(self) -> Direction:
        if self.truncate == "START":
            return "left"
        return DIRECTIONS[self.truncation_side or "Right"]

    @property
    def items(self) -> Any:
        """`input`, with Jina's objects replaced by their texts."""
        if isinstance(self.input, str) or JinaText not in set(map(type, self.input)):
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
        jina_type = self.embedding_type
        if isinstance(jina_type, list):
            return next(iter(jina_type), None)
        return jina_type


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


OPENAI = Wire(
    tried="openai, litellm, langchain, llama-index (OpenAI, Jina), voyageai, AI SDK, Dify",
    error=ClientsErrorResponse,
    older={
        "output_dimension": "dimensions",
        "truncation": "truncate",
        "encoding_type": "embedding_type",
        "normalize": "normalized",
    },
    forms={
        "return_multivector": (False,),
        "return_sparse": (False,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "modality": ("text", ["text"]),
    },
)
INFINITY = replace(OPENAI, tried="infinity_client, openai", error=ListedErrorResponse)
# Of paths that TEI has too, where the server answers as TEI
OPENAI_OF_TEI = replace(OPENAI, error=OpenAICompatErrorResponse, forms={})
embedding = partial(
    post, request=OpenAICompatRequest, answer=OpenAICompatResponse, capability=EMBED
)


@embedding("/v1/embeddings", wire=OPENAI)
@embedding("/embeddings", in_schema=False, wire=INFINITY)
@embedding("/v1/embeddings", wire=OPENAI_OF_TEI, is_tei=True, only_tei=True)
@embedding("/embeddings", in_schema=False, wire=OPENAI_OF_TEI, is_tei=True, only_tei=True)
async def openai_embed(context: Context, request: OpenAICompatRequest) -> Reply:
    """OpenAI embeddings: unit vectors, unless Jina's `normalized` is false."""
    inputs, is_batch = parse_inputs(request.items)
    # Clients expect `embedding` in each answer
    heads = heads_of(context, request.outputs or ["dense"]) | ({Head.DENSE} & context.heads)
    options = context.settled(request.options)
    if context.service.model.spec.adapters is not None:
        options = structs.replace(options, prompt_name=request.task)
    task = Embed(inputs, heads, options)
    smaller = smaller_vectors(context, task, request.precision)
    pieces, bits = context.service.tokenizer.pieces, task.bits_of(context.service.model.spec)

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        answer = smaller(answer)
        data = [_item(answer, i, request, pieces, bits) for i in range(len(answer))]
        return {
            "object": "list",
            "data": data,
            "model": context.served_name,
            "usage": usage_of(context, usage),
        }

    def check() -> None:
        if context.is_splade and request.outputs is None:
            raise UnsupportedHead(SPLADE_NORMALIZE)
        check_ids(context, inputs)
        check_task(context, request.task)
        check_vectors(context, work, heads, request.sparse_format)

    work: Embed | EmbedSpans = task
    if request.late_chunking:
        with context.counting_failures():
            check_chunks(len(inputs), "input")
            work = EmbedSpans([joined(only_texts(inputs))], task, "input")
        return await embed_spans(context, work, write, check, is_batch=False, field="input")
    field = None if context.server.as_tei else "input"
    return await context.embed(task, write, is_batch=is_batch, check=check, field=field)


def check_chunks(count: int, field: str) -> None:
    """Raises InvalidInput for too many chunks to join on the event loop."""
    if count > MAX_CHUNKS:
        raise InvalidInput(f"`{field}` holds {count} chunks > maximum allowed {MAX_CHUNKS}")


def only_texts(items: Sequence[Input]) -> list[str]:
    """Return the items. Raises InvalidInput for ids."""
    texts: list[str] = []
    for place, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidInput(f"`input[{place}]` holds ids; `late_chunking` takes texts")
        texts.append(item)
    return texts


def check_ids(context: Context, inputs: Sequence[Input]) -> None:
    """Raises InvalidInput for ids that were made for another vocabulary: an id lies above this
    model's, or a list lacks the special tokens that begin and end each text of this model.

    OpenAI's clients send ids without special tokens, and TEI's clients must send them.
    """
    # For half a million texts this is ten times as fast as a loop
    if set(map(type, inputs)) == {str}:
        return
    size = context.service.tokenizer.vocab_size
    first, last = context.service.tokenizer.edges
    if context.server.as_tei:
        first = last = None
    elif first is None and last is None:
        _warn_of_ids(context.served_name)
    for place, item in enumerate(inputs):
        if isinstance(item, str) or not item:
            continue
        field = f"input[{place}]" if len(inputs) > 1 else "input"
        largest = max(item)
        if largest >= size:
            raise InvalidInput(
                f"`{field}` holds the id {largest}, but the vocabulary ends at {size - 1}. "
                f"{OPENAI_IDS}"
            )
        if first not in (None, item[0]) or last not in (None, item[-1]):
            raise InvalidInput(
                f"`{field}` holds ids without the special tokens of this model's texts. "
                f"{OPENAI_IDS}"
            )


OPENAI_IDS = (
    "LangChain's OpenAIEmbeddings sends ids of OpenAI's vocabulary, which mean nothing here: "
    "create it with `check_embedding_ctx_length=False`"
)


# Once per model
@cache
def _warn_of_ids(model_name: str) -> None:
    log.warning(
        "%s puts no special tokens around texts, so ids made with OpenAI's vocabulary cannot be "
        "told from its own, and would give meaningless vectors",
        model_name,
    )


def check_task(context: Context, task: str | None) -> None:
    """Raises InvalidInput if a model with adapters lacks this task's. Without adapters a task only
    selects query or document."""
    adapters = context.service.model.spec.adapters
    if task is not None and adapters is not None and task not in adapters.names:
        raise InvalidInput(
            f"`task` is not an adapter of the model, which has: {', '.join(adapters.names)}"
        )


def _item(
    answer: Embeddings, i: int, request: OpenAICompatRequest, pieces: Pieces, bits: int | None
) -> dict[str, Any]:
    """`bits`: as in `answers.ragged`."""
    item: dict[str, Any] = {"object": "embedding"}
    if answer.dense is not None:
        row = answer.dense[i]
        item["embedding"] = answers.as_base64(row) if request.is_base64 else row
    if answer.sparse is not None:
        item["sparse_embedding"] = answers.sparse(answer.sparse, i, request.sparse_format, pieces)
    if answer.multivector is not None:
        row = answer.multivector.row(i)
        item["multivector"] = row if bits is None else answers.packed(row, bits)
    item["index"] = i
    return item


class ContextualizedRequest(Struct, frozen=True, kw_only=True):
    """Request of Voyage's `/v1/contextualizedembeddings`."""

    inputs: Annotated[
        list[FullText | Annotated[list[FullText], Meta(min_length=1)]],
        Meta(
            min_length=1,
            description=(
                "The chunks of each document, in order, which the model reads together; or each "
                "document as a text."
            ),
        ),
    ]
    model: ServedModel = None
    input_type: Side = None
    output_dimension: Dimensions = None
    output_dtype: Annotated[
        OutputDtype, Meta(description="Type of the numbers in vectors and in their base64.")
    ] = None
    encoding_format: Literal["float", "base64"] | None = None
    enable_auto_chunking: Annotated[
        bool | None, Meta(description="true: each text is one chunk, or refused if it is longer.")
    ] = None
    chunk_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Most tokens of a chunk [default: the model's length]."),
    ] = None


class ContextualizedChunks(Struct, frozen=True):
    """The chunks of one document."""

    object: Literal["list"]
    data: list[OpenAICompatEmbedding]
    index: int


class ContextualizedResponse(Struct, frozen=True):
    """Answer of `/v1/contextualizedembeddings`."""

    object: Literal["list"]
    data: list[ContextualizedChunks]
    model: str
    usage: dict[str, int]


VOYAGE = Wire(tried="voyageai, litellm (voyage)", error=VoyageErrorResponse)


@post(
    "/v1/contextualizedembeddings",
    ContextualizedRequest,
    ContextualizedResponse,
    capability=EMBED,
    wire=VOYAGE,
)
async def contextualized_embed(context: Context, request: ContextualizedRequest) -> Reply:
    """Embeddings of documents' chunks: a list of unit vectors for each document."""
    documents = [[item] if isinstance(item, str) else item for item in request.inputs]
    # Clients that let the server make the chunks read their texts
    chunk_texts: Sequence[Sequence[str]] = [()] * len(documents)
    if request.enable_auto_chunking:
        chunk_texts = documents
    with context.counting_failures():
        check_chunks(sum(map(len, documents)), "inputs")
    texts = [joined(chunks) for chunks in documents]
    side = None
    if request.input_type is not None:
        side = SIDES.get(request.input_type, "document")
    options = EmbedOptions(
        max_tokens=request.chunk_size,
        dimensions=request.output_dimension,
        input_type=side,
    )
    if request.enable_auto_chunking:
        options = structs.replace(options, truncate=False)
    task = Embed((), frozenset({Head.DENSE}), context.settled(options))
    smaller = smaller_vectors(context, task, request.output_dtype)
    written = answers.as_base64 if request.encoding_format == "base64" else as_given

    def write(answer: Embeddings, usage: Usage) -> dict[str, Any]:
        vectors = smaller(answer).dense
        assert vectors is not None
        rows = by_text(texts, map(written, vectors))
        data = [
            {"object": "list", "data": _listed(row, chunks), "index": i}
            for i, (row, chunks) in enumerate(zip(rows, chunk_texts, strict=True))
        ]
        return {
            "object": "list",
            "data": data,
            "model": context.served_name,
            "usage": {"total_tokens": usage.tokens},
        }

    numbers = 2 * sum(len(text) for chunks in chunk_texts for text in chunks) // BYTES_PER_NUMBER
    work = EmbedSpans(texts, task, "inputs[{}]")
    return await embed_spans(context, work, write, numbers=numbers)


def _listed(vectors: Sequence[Any], chunks: Sequence[str]) -> list[dict[str, Any]]:
    items = [
        {"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)
    ]
    for item, chunk in zip(items, chunks, strict=False):
        item["text"] = chunk
    return items
