"""The methods of `tei.v1`: a message -> the request of the HTTP route; its answer -> a message's
bytes.

Differences from HTTP: a message has one text; `truncate`, `add_special_tokens` and
`skip_special_tokens` default to false, even if the server's settings differ; `normalize` defaults
to true.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from time import perf_counter_ns
from typing import Any, Literal

from hybridtei.errors import EmptyInput, NoInputs, RequestRefused, UnsupportedHead, WrongModel
from hybridtei.inference.tasks.rerank import RerankPairs, rerank_task
from hybridtei.options import RankOptions
from hybridtei.outputs import Load, Usage
from hybridtei.server.api import embed, ops, tei
from hybridtei.server.api.predict import predict
from hybridtei.server.api.rerank import RerankRequest, rerank
from hybridtei.server.context import CHUNK_DOCUMENTS, Context, Reply
from hybridtei.server.grpc import messages
from hybridtei.server.grpc.messages import float_rows, floats
from hybridtei.server.models import CLASSIFY, EMBED, EMBED_SPARSE, RANK, Able
from hybridtei.system.frames import nested

# Field numbers in every answer of a forward pass
ROWS, METADATA = 1, 2
# Bound of the texts in one stream, in times --payload-limit
STREAM_PAYLOADS = 16
TOKEN_FIELDS = ("id", "text", "special", "start", "stop")
MODEL_TYPES = {"embedding": 0, "classifier": 1, "reranker": 2}


def _request(kind: Any, message: Any, **values: Any) -> Any:
    """The HTTP route's request. A missing field gets the message's default, a missing optional
    field the route's default."""
    fields = {field.name: value for field, value in message.ListFields()} | values
    fields["truncate"] = message.truncate
    fields["truncation_direction"] = _side(message)
    return kind(**fields)


def _side(message: Any) -> Literal["left", "right"]:
    # An unknown value means the default
    return "left" if message.truncation_direction == messages.LEFT else "right"


def _answer(answer: Any, usage: Usage | None) -> Reply:
    """The bytes of a message, or bytes, followed by its `metadata`."""
    assert usage is not None
    body = answer if isinstance(answer, bytes) else answer.SerializeToString()
    times = usage.timings
    metadata = messages.Metadata(
        compute_chars=usage.load.characters,
        compute_tokens=usage.tokens,
        total_time_ns=perf_counter_ns() - usage.began_ns,
        tokenization_time_ns=times.tokenization_ns,
        queue_time_ns=times.queue_ns,
        inference_time_ns=times.inference_ns,
    )
    return Reply(body + nested(METADATA, metadata.SerializeToString()), usage)


async def _embed(context: Context, message: Any) -> Reply:
    reply = await embed.embed(context, _request(tei.EmbedRequest, message, inputs=message.inputs))
    return _answer(floats(ROWS, reply.answer[0]), reply.usage)


async def _embed_all(context: Context, message: Any) -> Reply:
    reply = await embed.embed_all(
        context, _request(tei.EmbedAllRequest, message, inputs=message.inputs)
    )
    return _answer(float_rows(ROWS, 1, reply.answer[0]), reply.usage)


async def _embed_sparse(context: Context, message: Any) -> Reply:
    request = _request(tei.EmbedSparseRequest, message, inputs=message.inputs)
    reply = await embed.embed_sparse(context, request, lambda answer, _: answer.sparse)
    pairs = zip(*(array.tolist() for array in reply.answer.row(0)), strict=True)
    return _answer(
        messages.EmbedSparseResponse(
            sparse_embeddings=[{"index": i, "value": v} for i, v in pairs]
        ),
        reply.usage,
    )


async def _predict(context: Context, message: Any) -> Reply:
    """Answer `Predict`, and `PredictPair` for one or two texts."""
    inputs = message.inputs
    if not isinstance(inputs, str):
        if len(inputs) not in (1, 2):
            with context.counting_failures():
                raise RequestRefused(
                    f"`inputs` must have a single or two elements. Given: {len(inputs)}"
                )
        inputs = [*inputs]
    reply = await predict(context, _request(tei.PredictRequest, message, inputs=inputs))
    return _answer(messages.PredictResponse(predictions=reply.answer), reply.usage)


async def _tokenize(context: Context, message: Any) -> Reply:
    prompt_name = message.prompt_name if message.HasField("prompt_name") else None

    # Runs in a thread: tokenizing a long text would block the event loop
    def tokenize() -> bytes:
        tokens = context.service.reader.tokens(
            message.inputs, add_special_tokens=message.add_special_tokens, prompt_name=prompt_name
        )
        rows = [{name: getattr(token, name) for name in TOKEN_FIELDS} for token in tokens]
        return bytes(messages.EncodeResponse(tokens=rows).SerializeToString())

    with context.counting_failures():
        return Reply(await context.service.aside(tokenize))


async def _decode(context: Context, message: Any) -> Reply:
    with context.counting_failures():
        if not message.ids:
            raise EmptyInput("`input_ids` cannot be empty")
        context.service.reader.check_ids(message.ids, "ids")
        decode = partial(
            context.service.tokenizer.decode,
            [*message.ids],
            skip_special_tokens=message.skip_special_tokens,
        )
        text = await context.service.aside(decode)
    return Reply(messages.DecodeResponse(text=text).SerializeToString())


async def _info(context: Context, _: Any) -> Reply:
    """Answer `Info`: the fields of `/info` that the message has."""
    facts = ops.facts(context)
    names = [
        field.name
        for field in messages.InfoResponse.DESCRIPTOR.fields
        if field.name != "model_type"
    ]
    values = {name: facts[name] for name in names if facts[name] is not None}
    model_type = MODEL_TYPES[next(iter(facts["model_type"]))]
    return Reply(messages.InfoResponse(model_type=model_type, **values).SerializeToString())


async def _rerank(context: Context, message: Any) -> Reply:
    with context.counting_failures():
        if not message.texts:
            raise NoInputs("`texts` cannot be empty")
        _check_ranker(context)
        # A message of 4 MB may have two million
        context.check_batch(len(message.texts))
    reply = await rerank(
        context, _request(RerankRequest, message, query=message.query, texts=[*message.texts])
    )
    return _answer(messages.RerankResponse(ranks=reply.answer), reply.usage)


async def _rerank_stream(context: Context, requests: AsyncIterator[Any]) -> Reply:
    """Answer `RerankStream`: one message after the client's last text, with the scores of all
    texts, the best first.

    Each message has a query and a text. Consecutive texts with the same query go through the engine
    together. Few streams may read at a time, since each holds all its texts.
    """
    with context.counting_failures():
        _check_ranker(context)
        with context.service.gathering.inside(1):
            received = await _read_all(context, requests)
    texts: list[str] = []
    for message in received:
        # Each is decoded once; others get the event loop in between
        texts.append(message.text)
        await asyncio.sleep(0)
    task = RerankPairs(
        [
            rerank_task(
                context.service.model.spec,
                query,
                [text for _, text in group],
                RankOptions(
                    truncate=truncate,
                    truncation_direction=side,
                    raw_scores=received[0].raw_scores,
                ),
            )
            for (query, truncate, side), group in groupby(
                zip(received, texts, strict=True),
                lambda pair: (pair[0].query, pair[0].truncate, _side(pair[0])),
            )
        ]
    )
    characters = sum(len(message.query) for message in received) + sum(map(len, texts))
    load = Load(len(received), characters, is_batch=True)
    bounds = context.bounds(load.inputs, CHUNK_DOCUMENTS).in_chunks(CHUNK_DOCUMENTS)
    scored, usage = await context.run(task, load, bounds, scope="predict")
    shown = texts if received[0].return_text else [None] * len(texts)
    ranks = [{"index": i, "text": shown[i], "score": scored.scores[i]} for i in scored.order]
    return _answer(messages.RerankResponse(ranks=ranks), usage)


def _check_ranker(context: Context) -> None:
    """Raises WrongModel if the model cannot rank."""
    spec = context.service.model.spec
    try:
        rerank_task(spec, "", []).check(spec)
    except UnsupportedHead as error:
        raise WrongModel(
            "model is not a classifier model" if spec.role == "embedding" else str(error)
        ) from None


async def _read_all(context: Context, requests: AsyncIterator[Any]) -> list[Any]:
    """Read all messages of a stream. Raises NoInputs; RequestRefused above the bounds of texts or
    bytes."""
    max_texts = context.server.max_rerank_documents
    max_bytes = STREAM_PAYLOADS * context.server.payload_limit
    messages: list[Any] = []
    size = 0
    async for message in requests:
        messages.append(message)
        size += message.ByteSize()
        if len(messages) > max_texts:
            raise RequestRefused(f"a stream of more than {max_texts} texts (max-rerank-documents)")
        if size > max_bytes:
            raise RequestRefused(
                f"a stream of more than {max_bytes} bytes ({STREAM_PAYLOADS} times payload-limit)"
            )
    if not messages:
        raise NoInputs("`texts` cannot be empty")
    return messages


def _vectors_of_tokens(context: Context, message: Any) -> int:
    """The size of one float32 vector for each token. A text has at most about one token a byte."""
    spec = context.service.model.spec
    return min(int(message.ByteSize()), spec.max_input_length) * spec.hidden_size * 4


def _times(factor: int) -> Callable[[Context, Any], int]:
    return lambda _, message: factor * int(message.ByteSize())


@dataclass(frozen=True, slots=True)
class Method:
    """How to answer a call, the name of its span, and the capability that chooses the model.
    `permits`: each message of a stream waits for a permit. `estimate`: the approximate bytes of an
    answer, 0 if it does not grow. `most`: messages of a stream that run at once."""

    answer: Callable[[Context, Any], Coroutine[Any, Any, Reply]]
    span: str | None
    capability: Sequence[Able] = ()
    permits: bool = True
    estimate: Callable[[Context, Any], int] = lambda *_: 0
    most: int = 1024


METHODS = {
    "Info": Method(_info, None),
    "Embed": Method(_embed, "embed", EMBED),
    "EmbedSparse": Method(_embed_sparse, "embed_sparse", EMBED_SPARSE),
    "EmbedAll": Method(_embed_all, "embed_all", EMBED, estimate=_vectors_of_tokens),
    "Predict": Method(_predict, "predict", CLASSIFY),
    "PredictPair": Method(_predict, "predict", CLASSIFY),
    "Rerank": Method(_rerank, "rerank", RANK, estimate=_times(1)),
    "RerankStream": Method(_rerank_stream, "rerank", RANK),
    "Tokenize": Method(_tokenize, "tokenize", permits=False, estimate=_times(20), most=1),
    "Decode": Method(_decode, "decode", permits=False, estimate=_times(8), most=1),
}
