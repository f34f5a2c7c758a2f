"""Embedding, classification, tokens and facts: a message -> the request of the HTTP route, its answer -> a message's bytes.

What differs from HTTP: a message holds one text; `truncate`, `add_special_tokens` and `skip_special_tokens` are false unless
given, whatever the server's default; `normalize` is true.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from hybridtei.batch import Head
from hybridtei.engine.service import in_order
from hybridtei.errors import EmptyInput, NoInputs, RequestRefused, UnsupportedHead, WrongModel
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Embeddings, Floats, Usage
from hybridtei.rpc import messages
from hybridtei.rpc.messages import float_rows, floats, nested
from hybridtei.server.api import embed as embeddings
from hybridtei.server.api import rerank as ranking
from hybridtei.server.api import tei
from hybridtei.server.api.classify import predict as classified
from hybridtei.server.api.ops import facts
from hybridtei.server.api.rerank import DocumentsRequest, RerankRequest
from hybridtei.server.api.tei import TruncationDirection, parse_inputs
from hybridtei.server.api.tei import direction as direction_of
from hybridtei.server.context import Context, Reply
from hybridtei.tasks.classify import best_first
from hybridtei.tasks.embed import Embed
from hybridtei.tasks.rerank import rerank_task

ROWS, METADATA = 1, 2  # fields of every answer that a pass gives
STREAM_PAYLOADS = 16  # so many bodies of --payload-limit bytes may the texts of one stream hold
GROUPS_INSIDE = 64  # queries of one stream that are worked on at once
MODEL_TYPES = {"embedding": 0, "classifier": 1, "reranker": 2}

Decode = Callable[[bytes], Any]


def side(message: Any) -> TruncationDirection:
    """The side that is cut off; a number nobody knows is the default."""
    return "Left" if message.truncation_direction == messages.LEFT else "Right"


def optional(message: Any, field: str) -> Any:
    """The field's value, or None where the client left it out."""
    return getattr(message, field) if message.HasField(field) else None


def cost(usage: Usage) -> Any:
    """Metadata."""
    times = usage.timings
    return messages.Metadata(
        compute_chars=usage.load.characters,
        compute_tokens=usage.tokens,
        total_time_ns=perf_counter_ns() - usage.began_ns,
        tokenization_time_ns=times.tokenization_ns,
        queue_time_ns=times.queue_ns,
        inference_time_ns=times.inference_ns,
    )


def told(rows: bytes, usage: Usage | None) -> Reply:
    """An answer whose first field is written already."""
    assert usage is not None
    return Reply(rows + nested(METADATA, cost(usage).SerializeToString()), usage)


async def embed(context: Context, message: Any) -> Reply:
    """`Embed`."""
    normalize, dimensions = optional(message, "normalize"), optional(message, "dimensions")
    request = tei.EmbedRequest(
        inputs=message.inputs,
        truncate=message.truncate,
        truncation_direction=side(message),
        prompt_name=optional(message, "prompt_name"),
        normalize=normalize is not False,
        dimensions=dimensions,
    )
    reply = await embeddings.embed(context, request)
    return told(floats(ROWS, reply.answer[0]), reply.usage)


async def embed_all(context: Context, message: Any) -> Reply:
    """`EmbedAll`."""
    request = tei.EmbedAllRequest(
        inputs=message.inputs,
        truncate=message.truncate,
        truncation_direction=side(message),
        prompt_name=optional(message, "prompt_name"),
    )
    reply = await embeddings.embed_all(context, request)
    return told(float_rows(ROWS, 1, reply.answer[0]), reply.usage)


@handler("embed_sparse")
async def embed_sparse(context: Context, message: Any) -> Reply:
    """`EmbedSparse`. The route's own answer is JSON already, so its task is built here."""
    inputs = parse_inputs(message.inputs)
    direction = direction_of(side(message))
    task = Embed(
        inputs.items, frozenset({Head.SPARSE}), message.truncate, direction, prompt_name=optional(message, "prompt_name")
    )
    refusal = None if Head.SPARSE in context.heads else UnsupportedHead(embeddings.NOT_SPLADE)
    reply = await context.embed(task, inputs, _sparse, refusal=refusal)
    return told(reply.answer, reply.usage)


def _sparse(answer: Embeddings, _: Usage) -> bytes:
    assert answer.sparse is not None
    indices, values = answer.sparse.row(0)
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    entries = [messages.SparseValue(index=index, value=value) for index, value in pairs]
    return bytes(messages.EmbedSparseResponse(sparse_embeddings=entries).SerializeToString())


async def predict(context: Context, message: Any) -> Reply:
    """`Predict`."""
    return await _predicted(context, message, message.inputs)


async def predict_pair(context: Context, message: Any) -> Reply:
    """`PredictPair`: of one text, or of two."""
    texts = [*message.inputs]
    if len(texts) not in (1, 2):
        with context.counting_failures():
            raise RequestRefused(f"`inputs` must have a single or two elements. Given: {len(texts)}")
    return await _predicted(context, message, texts)


async def _predicted(context: Context, message: Any, inputs: Any) -> Reply:
    request = tei.PredictRequest(
        inputs=inputs, truncate=message.truncate, truncation_direction=side(message), raw_scores=message.raw_scores
    )
    reply = await classified(context, request)
    labels = [messages.Prediction(score=item["score"], label=item["label"]) for item in reply.answer]
    return told(messages.PredictResponse(predictions=labels).SerializeToString(), reply.usage)


@handler("tokenize")
async def tokenize(context: Context, message: Any) -> Reply:
    """`Tokenize`: takes no permit."""
    read = partial(
        context.service.reader.tokens,
        [message.inputs],
        add_special_tokens=message.add_special_tokens,
        prompt_name=optional(message, "prompt_name"),
    )

    def work() -> bytes:
        tokens = [
            messages.SimpleToken(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
            for token in read()[0]
        ]
        return bytes(messages.EncodeResponse(tokens=tokens).SerializeToString())

    with context.counting_failures():
        return Reply(await context.service.aside(work))


@handler("decode")
async def decode(context: Context, message: Any) -> Reply:
    """`Decode`: takes no permit."""
    with context.counting_failures():
        if not message.ids:
            raise EmptyInput("`input_ids` cannot be empty")
        reader = context.service.reader
        reader.check_ids(message.ids, "ids")
        work = partial(context.service.tokenizer.decode, [*message.ids], skip_special_tokens=message.skip_special_tokens)
        text = await context.service.aside(work)
    return Reply(messages.DecodeResponse(text=text).SerializeToString())


async def info(context: Context, _: Any) -> Reply:
    """`Info`: what `/info` tells, by the names there."""
    found = facts(context)
    names = [field.name for field in messages.InfoResponse.DESCRIPTOR.fields if field.name != "model_type"]
    known = {name: found[name] for name in names if found[name] is not None}
    kind = MODEL_TYPES[next(iter(found["model_type"]))]
    return Reply(messages.InfoResponse(model_type=kind, **known).SerializeToString())


async def rerank(context: Context, message: Any) -> Reply:
    """`Rerank`. Waits for permits."""
    texts = [*message.texts]
    with context.counting_failures():
        if not texts:
            raise NoInputs("`texts` cannot be empty")
        _check(context)
    request = RerankRequest(
        query=message.query,
        texts=texts,
        truncate=message.truncate,
        truncation_direction=side(message),
        raw_scores=message.raw_scores,
        return_text=message.return_text,
    )
    async with context.service.admission.held(len(texts)):
        reply = await ranking.rerank(context, request)
    ranks = [messages.Rank(index=item["index"], text=item.get("text"), score=item["score"]) for item in reply.answer]
    return told(messages.RerankResponse(ranks=ranks).SerializeToString(), reply.usage)


async def rerank_stream(context: Context, requests: AsyncIterator[bytes], decode: Decode) -> Reply:
    """`RerankStream`. Waits for permits: for one before it reads, and then for those of its texts."""
    with context.counting_failures():
        _check(context)
    admission = context.service.admission
    async with admission.gathering:
        with context.counting_failures():
            async with admission.held(1):  # not longer: those who hold one and wait for many would wait for each other
                given = await _collected(context, requests, decode)
        return await _ranked(context, given)


async def _ranked(context: Context, given: Sequence[Any]) -> Reply:
    began_ns = perf_counter_ns()
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, message in enumerate(given):
        groups[message.query, message.truncate, message.truncation_direction].append(place)
    starts = (partial(_group, context, [given[place] for place in places], given[0].raw_scores) for places in groups.values())
    parts = await in_order(starts, GROUPS_INSIDE)
    scores = np.empty(len(given), dtype=np.float32)
    for places, (part, _) in zip(groups.values(), parts, strict=True):
        scores[places] = part
    texts = [message.text for message in given] if given[0].return_text else None
    return told(_ranks(scores, texts), replace(Usage.total([usage for _, usage in parts]), began_ns=began_ns))


def _check(context: Context) -> None:
    """Raises WrongModel if the model cannot rank."""
    spec = context.service.model.spec
    try:
        rerank_task(spec, "", []).check(spec)
    except UnsupportedHead as error:
        raise WrongModel("model is not a classifier model" if spec.kind == "embedding" else str(error)) from None


async def _collected(context: Context, requests: AsyncIterator[bytes], decode: Decode) -> list[Any]:
    """All messages. Raises NoInputs; RequestRefused for more than one answer may be about."""
    most, room = context.server.max_rerank_documents, STREAM_PAYLOADS * context.server.payload_limit
    given: list[Any] = []
    async for data in requests:
        given.append(decode(data))
        room -= len(data)
        if len(given) > most:
            raise RequestRefused(f"a stream of more than {most} texts (max-rerank-documents)")
        if room < 0:
            limit = STREAM_PAYLOADS * context.server.payload_limit
            raise RequestRefused(f"a stream of more than {limit} bytes ({STREAM_PAYLOADS} times payload-limit)")
    if not given:
        raise NoInputs("`texts` cannot be empty")
    return given


def _group(context: Context, given: Sequence[Any], raw_scores: bool) -> Coroutine[Any, Any, tuple[Floats, Usage]]:
    """Scores float32[n] of texts with one query, by place."""
    request = DocumentsRequest(
        query=given[0].query,
        documents=[message.text for message in given],
        truncate=given[0].truncate,
        truncation_direction=side(given[0]),
        raw_scores=raw_scores,
    )

    async def work() -> tuple[Floats, Usage]:
        async with context.service.admission.held(len(given)):
            reply = await ranking.rerank_documents(context, request)
        assert reply.usage is not None
        scores = np.empty(len(given), dtype=np.float32)
        for item in reply.answer["results"]:
            scores[item["index"]] = item["relevance_score"]
        return scores, reply.usage

    return work()


def _ranks(scores: Floats, texts: Sequence[str] | None) -> bytes:
    ranks = [
        messages.Rank(index=place, text=None if texts is None else texts[place], score=scores[place])
        for place in best_first(scores).tolist()
    ]
    return bytes(messages.RerankResponse(ranks=ranks).SerializeToString())
