"""hybridtei's own embedding routes: several outputs of one forward pass in one answer.

They refuse unknown fields, since a misspelled option would otherwise be ignored silently.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from hybridtei.batch import Head, Ragged
from hybridtei.errors import NoInputs, UnsupportedHead
from hybridtei.inference.tasks.embed import Embed, cosine
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.reader import Input
from hybridtei.options import Budget, Long, Side, Size
from hybridtei.outputs import Embeddings, Floats, Usage, cut
from hybridtei.server import answers
from hybridtei.server.api.tei import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    SimilarityParameters,
    SimilarityRequest,
    SparseValue,
    parse_inputs,
)
from hybridtei.server.context import Context, Reply, Write
from hybridtei.server.models import EMBED, EMBED_HYBRID, EMBED_MULTIVECTOR, EMBED_SPARSE
from hybridtei.server.routing import post
from hybridtei.server.vectors import (
    SPLADE_NORMALIZE,
    OutputDtype,
    Outputs,
    SpannedInputs,
    SparseFormat,
    embed_spanned,
    heads_of,
    pooled,
    pooled_head,
    smaller_vectors,
    splade_rows,
)

ModelName = Annotated[
    str | None, Meta(description="Which of several models embeds [default: the first that can].")
]


class EmbedMultivectorRequest(
    EmbedAllRequest, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Request of `/embed_multivector`."""

    uses_default_prompt: ClassVar[bool] = True
    inputs: SpannedInputs  # type: ignore[assignment,unused-ignore]
    dimensions: Annotated[
        Size | None,
        Meta(description="Keep this many leading dimensions of dense and multi-vectors."),
    ] = None
    output_dtype: OutputDtype = None
    encoding_format: Annotated[
        Literal["float", "base64"],
        Meta(description="base64: of dense and multi-vectors, little-endian."),
    ] = "float"
    multivector: Budget = None
    input_type: Side = None
    long_inputs: Long = None
    model: ModelName = None

    def packed_width(self, task: Embed, spec: ModelSpec) -> int | None:
        """The numbers of a multi-vector that is written in base64, else None."""
        if self.encoding_format == "base64" and spec.multivector is not None:
            return min(task.options.dimensions or spec.multivector_width, spec.multivector_width)
        return task.bits_of(spec)


class EmbedHybridRequest(
    EmbedMultivectorRequest, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Request of `/embed_hybrid`."""

    outputs: Annotated[
        Outputs | None, Meta(description="Vectors to return [default: all of the model's].")
    ] = None
    normalize: Annotated[
        bool,
        Meta(description="Whether dense vectors are scaled to length 1; multi-vectors always are."),
    ] = True
    sparse_format: Annotated[
        SparseFormat,
        Meta(
            description=(
                "tei: list of {index, value}; qdrant: {indices, values}; tokens: {vocabulary "
                "piece: weight}."
            )
        ),
    ] = "tei"


class PackedVectors(Struct, frozen=True):
    """Multi-vectors in base64, row by row. One bit per number: uint8[n, ceil(d / 8)], the most
    significant bit first."""

    shape: Annotated[
        tuple[int, int], Meta(description="Number of vectors, and of numbers in each.")
    ]
    data: str


class HybridEmbedding(Struct, frozen=True, omit_defaults=True):
    """The requested vectors of one input."""

    dense: list[float] | str | None = None
    sparse: Annotated[
        list[SparseValue] | dict[str, Any] | None,
        Meta(description="List or object, depending on `sparse_format`."),
    ] = None
    multivector: Annotated[
        list[list[float]] | PackedVectors | None,
        Meta(description="Packed where its `dtype` is binary, and with base64."),
    ] = None


Vector = list[float]

DENSE, SPARSE = frozenset({Head.DENSE}), frozenset({Head.SPARSE})
BY_TABLE = ((b"x-query-encoder", b"table"),)
NOT_SPLADE = "Model is not an embedding model with SPLADE pooling"


@post("/embed", EmbedRequest, list[Vector], capability=EMBED, is_tei=True)
async def embed(context: Context, request: EmbedRequest) -> Reply:
    """Dense vectors. Those of a SPLADE model are over the vocabulary."""
    inputs, is_batch = parse_inputs(request.inputs)
    options = context.settled(request.options)
    if context.is_splade:
        return await _embed_splade(
            context,
            Embed(
                inputs,
                SPARSE,
                options,
            ),
            is_batch,
        )
    return await context.embed(
        Embed(
            inputs,
            DENSE,
            options,
        ),
        _dense,
        is_batch=is_batch,
    )


async def _embed_splade(context: Context, task: Embed, is_batch: bool) -> Reply:
    def check() -> None:
        if task.options.normalize:
            raise UnsupportedHead(SPLADE_NORMALIZE)
        task.check(spec)

    spec = context.service.model.spec
    return await context.embed(
        task,
        lambda answer, _: cut(splade_rows(answer), task.options.dimensions),
        is_batch=is_batch,
        check=check,
        numbers=len(task.inputs) * spec.dense_width,
    )


@post("/embed_all", EmbedAllRequest, list[list[Vector]], capability=EMBED, is_tei=True)
async def embed_all(context: Context, request: EmbedAllRequest) -> Reply:
    """A raw vector for each token."""
    inputs, is_batch = parse_inputs(request.inputs)
    task = Embed(
        inputs,
        frozenset({Head.TOKENS}),
        context.settled(request.options),
    )

    def check() -> None:
        if context.is_splade:
            raise UnsupportedHead("`embed_all` is not available for SPLADE models")
        task.check(context.service.model.spec)

    return await context.embed(
        task, lambda answer, _: _ragged(answer.tokens), is_batch=is_batch, check=check
    )


def _sparse(answer: Embeddings, _: Usage) -> list[Any]:
    assert answer.sparse is not None
    vectors = answer.sparse
    return [answers.sparse_tei(vectors, i) for i in range(len(vectors))]


@post(
    "/embed_sparse",
    EmbedSparseRequest,
    list[list[SparseValue]],
    capability=EMBED_SPARSE,
    is_tei=True,
)
async def embed_sparse(
    context: Context, request: EmbedSparseRequest, write: Write[Embeddings] = _sparse
) -> Reply:
    """Sparse vectors by SPLADE pooling or by lexical weights, depending on the model."""
    inputs, is_batch = parse_inputs(request.inputs)
    task = Embed(inputs, SPARSE, context.settled(request.options))

    def check() -> None:
        if Head.SPARSE not in context.heads:
            raise UnsupportedHead(NOT_SPLADE)
        task.check(context.service.model.spec)

    reply = await context.embed(task, write, is_batch=is_batch, check=check)
    return reply if request.query_encoder == "model" else structs.replace(reply, headers=BY_TABLE)


Vectors = list[list[float | Vector] | PackedVectors] | PackedVectors


@post("/embed_multivector", EmbedMultivectorRequest, list[Vectors], capability=EMBED_MULTIVECTOR)
async def embed_multivector(context: Context, request: EmbedMultivectorRequest) -> Reply:
    """A unit vector for each token of an input, or fewer; with spans, a list of such lists."""
    inputs, is_batch = parse_inputs(request.inputs)
    options = context.settled(request.options)
    task = Embed(inputs, frozenset({Head.MULTIVECTOR}), options)
    smaller = smaller_vectors(context, task, request.output_dtype)
    bits = request.packed_width(task, context.service.model.spec)
    return await embed_spanned(
        context,
        task,
        lambda answer, _: _ragged(smaller(answer).multivector, bits),
        is_batch=is_batch,
    )


@post(
    "/embed_hybrid",
    EmbedHybridRequest,
    list[HybridEmbedding | list[HybridEmbedding]],
    capability=EMBED_HYBRID,
)
async def embed_hybrid(context: Context, request: EmbedHybridRequest) -> Reply:
    """Every requested output, from one pass."""
    inputs, is_batch = parse_inputs(request.inputs)
    options = context.settled(request.options)
    task = Embed(inputs, heads_of(context, request.outputs), options)
    pieces = context.service.tokenizer.pieces
    bits = request.packed_width(task, context.service.model.spec)
    smaller = smaller_vectors(context, task, request.output_dtype)

    def write(answer: Embeddings, _: Usage) -> list[dict[str, Any]]:
        rows = answers.hybrid(smaller(answer), request.sparse_format, pieces, bits)
        if request.encoding_format == "base64" and answer.dense is not None:
            for row in rows:
                row["dense"] = answers.as_base64(row["dense"])
        return rows

    return await embed_spanned(context, task, write, request.sparse_format, is_batch=is_batch)


@post("/similarity", SimilarityRequest, Vector, capability=EMBED, is_tei=True)
async def similarity(context: Context, request: SimilarityRequest) -> Reply:
    """The cosine of the source sentence to each other one, from raw pooled vectors."""
    sentences = request.inputs.sentences
    if not sentences:
        raise NoInputs("`inputs.sentences` cannot be empty")
    inputs: list[Input] = [request.inputs.source_sentence, *sentences]
    options = (request.parameters or SimilarityParameters()).options
    task = Embed(
        inputs,
        frozenset({pooled_head(context)}),
        context.settled(options),
    )

    def write(answer: Embeddings, _: Usage) -> Floats:
        vectors = pooled(answer)
        return cosine(vectors[0], vectors[1:])

    return await context.embed(task, write)


def _ragged(rows: Ragged | None, bits: int | None = None) -> list[Any]:
    assert rows is not None
    return answers.ragged(rows, bits)


def _dense(answer: Embeddings, _: Usage) -> Floats:
    assert answer.dense is not None
    return answer.dense
