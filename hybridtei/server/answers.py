"""Wire to task to wire: what each inference route computes, free of HTTP, so that `/vertex` and `/` can ask for it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import orjson

from hybridtei.batch import Head
from hybridtei.errors import EmptyInput, UnsupportedHead
from hybridtei.outputs import Embeddings, Floats
from hybridtei.postprocess.vectors import cosine, cut
from hybridtei.ragged import Ragged
from hybridtei.server import encoding
from hybridtei.server.body import SchemaError
from hybridtei.server.context import Context, Reply
from hybridtei.server.errors import NoInputs
from hybridtei.server.observe import Usage
from hybridtei.server.wire.hybrid import EmbedHybridRequest, EmbedMultivectorRequest
from hybridtei.server.wire.openai import OpenAICompatRequest
from hybridtei.server.wire.tei import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Inputs,
    PredictRequest,
    RerankRequest,
    SimilarityParameters,
    SimilarityRequest,
    TokenizeRequest,
    direction,
    parse_inputs,
)
from hybridtei.tasks.embed import Embed

T = TypeVar("T")

SPLADE_NORMALIZE = "`normalize` is not available for SPLADE models"
NOT_SPLADE = "Model is not an embedding model with SPLADE pooling"


async def embed(context: Context, request: EmbedRequest) -> Reply:
    """`/embed`: a list of vectors; of a SPLADE model, dense over the vocabulary."""
    inputs = parse_inputs(request.inputs)
    task = _task(context, request, inputs, Head.DENSE, normalize=request.normalize, dimensions=request.dimensions)
    if context.is_splade:
        return await _embed_splade(context, replace(task, heads=frozenset({Head.SPARSE})), inputs)
    return await context.embed(task, inputs, lambda answer, _: encoding.array(_dense(answer)))


async def _embed_splade(context: Context, task: Embed, inputs: Inputs) -> Reply:
    return await context.embed(
        task,
        inputs,
        lambda answer, _: encoding.array(cut(_splade(answer), task.dimensions)),
        refusal=UnsupportedHead(SPLADE_NORMALIZE) if task.normalize else None,
        numbers=len(inputs.items) * context.service.model.spec.dense_width,
    )


async def embed_all(context: Context, request: EmbedAllRequest) -> Reply:
    """`/embed_all`: a vector a token, raw."""
    inputs = parse_inputs(request.inputs)
    task = _task(context, request, inputs, Head.TOKENS)
    refusal = UnsupportedHead("`embed_all` is not available for SPLADE models") if context.is_splade else None
    return await context.embed(task, inputs, lambda answer, _: _write_ragged(answer.tokens), refusal=refusal)


async def embed_sparse(context: Context, request: EmbedSparseRequest) -> Reply:
    """`/embed_sparse`: from SPLADE pooling or from lexical weights, whichever the model has."""
    inputs = parse_inputs(request.inputs)
    task = _task(context, request, inputs, Head.SPARSE)
    refusal = None if Head.SPARSE in context.heads else UnsupportedHead(NOT_SPLADE)
    return await context.embed(task, inputs, _write_sparse, refusal=refusal)


async def embed_multivector(context: Context, request: EmbedMultivectorRequest) -> Reply:
    """`/embed_multivector`: a list of lists of unit vectors."""
    inputs = parse_inputs(request.inputs)
    task = _task(context, request, inputs, Head.MULTIVECTOR, dimensions=request.dimensions)
    return await context.embed(task, inputs, lambda answer, _: _write_ragged(answer.multivector))


async def embed_hybrid(context: Context, request: EmbedHybridRequest) -> Reply:
    """`/embed_hybrid`: every wanted output of one pass."""
    inputs = parse_inputs(request.inputs)
    heads = _wanted(context, request.outputs)
    task = _task(context, request, inputs, *heads, normalize=request.normalize, dimensions=request.dimensions)
    pieces = context.service.model.reader.tokenizer.pieces
    return await context.embed(task, inputs, lambda answer, _: encoding.hybrid(answer, request.sparse_format, pieces))


async def openai_embed(context: Context, request: OpenAICompatRequest) -> Reply:
    """`/v1/embeddings`: always normalised."""
    inputs = parse_inputs(request.input, "input")
    refusal = UnsupportedHead(SPLADE_NORMALIZE) if context.is_splade and request.outputs is None else None
    heads = _wanted(context, request.outputs or ["dense"]) | ({Head.DENSE} & context.heads)  # the wire needs `embedding`
    task = Embed(inputs.items, heads, context.truncate(None), dimensions=request.dimensions)
    pieces = context.service.model.reader.tokenizer.pieces

    def write(answer: Embeddings, usage: Usage) -> bytes:
        return encoding.openai(
            answer,
            encoding_format=request.encoding_format,
            form=request.sparse_format,
            pieces=pieces,
            model=context.served_name,
            tokens=usage.tokens,
        )

    return await context.embed(task, inputs, write, refusal=refusal)


async def similarity(context: Context, request: SimilarityRequest) -> Reply:
    """`/similarity`: cosine of the first sentence to each other, from raw pooled vectors."""
    sentences = request.inputs.sentences
    if not sentences:
        raise NoInputs("`inputs.sentences` cannot be empty")
    inputs = Inputs([request.inputs.source_sentence, *sentences], is_batch=True)
    parameters = request.parameters or SimilarityParameters()
    splade = context.is_splade
    task = Embed(
        inputs.items,
        frozenset({Head.SPARSE if splade else Head.DENSE}),
        context.truncate(parameters.truncate),
        direction(parameters.truncation_direction),
        parameters.prompt_name,
        normalize=False,
    )

    def write(answer: Embeddings, _: Usage) -> bytes:
        vectors = _splade(answer) if splade else _dense(answer)
        return encoding.array(cosine(vectors[0], vectors[1:]))

    return await context.embed(task, inputs, write)


async def predict(context: Context, request: PredictRequest) -> Reply:
    """`/predict`: for classifiers, which this version does not load."""
    with context.counting_failures():
        raise UnsupportedHead("Model is not a classifier model")


async def rerank(context: Context, request: RerankRequest) -> Reply:
    """`/rerank`: for rerankers, which this version does not load."""
    with context.counting_failures():
        if not request.texts:
            raise NoInputs("`texts` cannot be empty")
        raise UnsupportedHead("model is not a re-ranker model")


async def tokenize(context: Context, request: TokenizeRequest) -> Reply:
    """`/tokenize`: every token with its place in the text; takes no permit."""
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    with context.counting_failures():
        if not texts:
            raise NoInputs("`inputs` cannot be empty")
        context.check_batch(len(texts))
        read = partial(
            context.service.model.reader.tokens,
            add_special_tokens=request.add_special_tokens,
            prompt_name=request.prompt_name,
        )
        # Text by text, and written there too: the tokens of a long request are many times its size.
        work = partial(_joined, texts, lambda text: orjson.dumps(read([text])[0]))
        return Reply(await context.service.aside(work))


async def decode(context: Context, request: DecodeRequest) -> Reply:
    """`/decode`: ids back to text; takes no permit."""
    with context.counting_failures():
        sequences = _sequences(request.ids)
        context.check_batch(len(sequences))
        if not all(sequences):
            raise EmptyInput("`input_ids` cannot be empty")
        text_of = partial(context.service.model.reader.tokenizer.decode, skip_special_tokens=request.skip_special_tokens)
        return Reply(await context.service.aside(partial(_joined, sequences, lambda ids: orjson.dumps(text_of(ids)))))


def _joined(items: Sequence[T], write: Callable[[T], bytes]) -> bytes:
    return encoding.joined(map(write, items))


def _sequences(raw: list[int | list[int]]) -> list[list[int]]:
    """A list of ids is one sequence, a list of lists is many. Raises SchemaError on a mixture."""
    single = [item for item in raw if isinstance(item, int)]
    many = [item for item in raw if isinstance(item, list)]
    if single and many:
        raise SchemaError("ids: data did not match any variant of untagged enum InputIds")
    return many or [single]


def _task(
    context: Context,
    request: EmbedAllRequest,
    inputs: Inputs,
    *heads: Head,
    normalize: bool = True,
    dimensions: int | None = None,
) -> Embed:
    return Embed(
        inputs.items,
        frozenset(heads),
        context.truncate(request.truncate),
        request.direction,
        request.prompt_name,
        normalize,
        dimensions,
    )


def _wanted(context: Context, outputs: Sequence[str] | None) -> frozenset[Head]:
    return context.heads - {Head.TOKENS} if outputs is None else frozenset(Head(output) for output in outputs)


def _write_sparse(answer: Embeddings, _: Usage) -> bytes:
    assert answer.sparse is not None
    vectors = answer.sparse
    return encoding.joined(encoding.sparse_tei(vectors, i) for i in range(len(vectors)))


def _write_ragged(rows: Ragged | None) -> bytes:
    assert rows is not None
    return encoding.ragged(rows)


def _dense(answer: Embeddings) -> Floats:
    assert answer.dense is not None
    return answer.dense


def _splade(answer: Embeddings) -> Floats:
    assert answer.sparse is not None
    return answer.sparse.to_dense()
