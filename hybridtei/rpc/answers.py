"""The methods of `tei.v1`: a message -> the request of the HTTP route; its answer -> a message's bytes; an error -> a status.

What differs from HTTP: a message holds one text; `truncate`, `add_special_tokens` and `skip_special_tokens` default to false,
whatever the server's default; `normalize` defaults to true. Errors have the messages of HTTP, and one table leads from its
error types to gRPC's codes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import grpc
import numpy as np

from hybridtei.batch import Head
from hybridtei.engine.service import in_order
from hybridtei.errors import (
    EmptyInput,
    Ended,
    Garbage,
    HybridTeiError,
    NoInputs,
    RequestRefused,
    UnsupportedHead,
    WrongModel,
)
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Embeddings, Floats, Usage
from hybridtei.rpc import messages
from hybridtei.rpc.messages import float_rows, floats
from hybridtei.server.api import embed, ops, rerank, tei
from hybridtei.server.api.predict import predict as predict_labels
from hybridtei.server.api.tei import direction, parse_inputs
from hybridtei.server.context import Context, Reply
from hybridtei.server.routing import row_of
from hybridtei.system.frames import nested
from hybridtei.tasks.embed import Embed
from hybridtei.tasks.label import best_first
from hybridtei.tasks.rerank import rerank_task

log = logging.getLogger(__name__)

ROWS, METADATA = 1, 2  # field numbers of every answer that costs a forward pass
STREAM_PAYLOADS = 16  # max bodies of --payload-limit bytes in the texts of one stream
MAX_GROUPS = 64  # queries of one stream that are in the engine at once
MODEL_TYPES = {"embedding": 0, "classifier": 1, "reranker": 2}

Decode = Callable[[bytes], Any]


def _truncation(message: Any) -> dict[str, Any]:
    """`truncate` and `truncation_direction`; an unknown direction is the default."""
    side = "Left" if message.truncation_direction == messages.LEFT else "Right"
    return {"truncate": message.truncate, "truncation_direction": side}


def _optional(message: Any, field: str) -> Any:
    """The field's value, or None where the client left it out."""
    return getattr(message, field) if message.HasField(field) else None


def _with_metadata(body: bytes, usage: Usage | None) -> Reply:
    """A serialised answer, followed by its `metadata`."""
    assert usage is not None
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


async def embed_dense(context: Context, message: Any) -> Reply:
    """`Embed`."""
    request = tei.EmbedRequest(
        inputs=message.inputs,
        prompt_name=_optional(message, "prompt_name"),
        normalize=_optional(message, "normalize") is not False,
        dimensions=_optional(message, "dimensions"),
        **_truncation(message),
    )
    reply = await embed.embed(context, request)
    return _with_metadata(floats(ROWS, reply.answer[0]), reply.usage)


async def embed_all(context: Context, message: Any) -> Reply:
    """`EmbedAll`."""
    request = tei.EmbedAllRequest(inputs=message.inputs, prompt_name=_optional(message, "prompt_name"), **_truncation(message))
    reply = await embed.embed_all(context, request)
    return _with_metadata(float_rows(ROWS, 1, reply.answer[0]), reply.usage)


@handler("embed_sparse")
async def embed_sparse(context: Context, message: Any) -> Reply:
    """`EmbedSparse`. The route's handler returns JSON, so the task is built here."""
    inputs = parse_inputs(message.inputs)
    task = Embed(
        inputs.items,
        frozenset({Head.SPARSE}),
        message.truncate,
        direction(_truncation(message)["truncation_direction"]),
        prompt_name=_optional(message, "prompt_name"),
        uses_default_prompt=False,
    )
    refusal = None if Head.SPARSE in context.heads else UnsupportedHead(embed.NOT_SPLADE)
    reply = await context.embed(task, inputs, _sparse, refusal=refusal)
    return _with_metadata(reply.answer, reply.usage)


def _sparse(answer: Embeddings, _: Usage) -> bytes:
    assert answer.sparse is not None
    indices, values = answer.sparse.row(0)
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    entries = [messages.SparseValue(index=index, value=value) for index, value in pairs]
    return bytes(messages.EmbedSparseResponse(sparse_embeddings=entries).SerializeToString())


async def predict(context: Context, message: Any) -> Reply:
    """`Predict`, and `PredictPair` of one text or two."""
    inputs = message.inputs
    if not isinstance(inputs, str):
        inputs = [*inputs]
        if len(inputs) not in (1, 2):
            with context.counting_failures():
                raise RequestRefused(f"`inputs` must have a single or two elements. Given: {len(inputs)}")
    request = tei.PredictRequest(inputs=inputs, raw_scores=message.raw_scores, **_truncation(message))
    reply = await predict_labels(context, request)
    labels = [messages.Prediction(score=item["score"], label=item["label"]) for item in reply.answer]
    return _with_metadata(messages.PredictResponse(predictions=labels).SerializeToString(), reply.usage)


@handler("tokenize")
async def tokenize(context: Context, message: Any) -> Reply:
    """`Tokenize`. Takes no permit."""
    prompt_name = _optional(message, "prompt_name")

    def work() -> bytes:
        read = context.service.reader.tokens
        found = read(message.inputs, add_special_tokens=message.add_special_tokens, prompt_name=prompt_name)
        tokens = [
            messages.SimpleToken(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
            for token in found
        ]
        return bytes(messages.EncodeResponse(tokens=tokens).SerializeToString())

    with context.counting_failures():
        return Reply(await context.service.aside(work))


@handler("decode")
async def decode(context: Context, message: Any) -> Reply:
    """`Decode`. Takes no permit."""
    with context.counting_failures():
        if not message.ids:
            raise EmptyInput("`input_ids` cannot be empty")
        context.service.reader.check_ids(message.ids, "ids")
        work = partial(context.service.tokenizer.decode, [*message.ids], skip_special_tokens=message.skip_special_tokens)
        text = await context.service.aside(work)
    return Reply(messages.DecodeResponse(text=text).SerializeToString())


async def info(context: Context, _: Any) -> Reply:
    """`Info`: the fields of `/info` that the message has."""
    facts = ops.facts(context)
    names = [field.name for field in messages.InfoResponse.DESCRIPTOR.fields if field.name != "model_type"]
    known = {name: facts[name] for name in names if facts[name] is not None}
    model_type = MODEL_TYPES[next(iter(facts["model_type"]))]
    return Reply(messages.InfoResponse(model_type=model_type, **known).SerializeToString())


async def rerank_texts(context: Context, message: Any) -> Reply:
    """`Rerank`. Waits for permits."""
    texts = [*message.texts]
    with context.counting_failures():
        if not texts:
            raise NoInputs("`texts` cannot be empty")
        _check_ranker(context)
    request = rerank.RerankRequest(
        query=message.query,
        texts=texts,
        raw_scores=message.raw_scores,
        return_text=message.return_text,
        **_truncation(message),
    )
    async with context.service.admission.held(len(texts)):
        reply = await rerank.rerank(context, request)
    ranks = [messages.Rank(index=item["index"], text=item.get("text"), score=item["score"]) for item in reply.answer]
    return _with_metadata(messages.RerankResponse(ranks=ranks).SerializeToString(), reply.usage)


async def rerank_stream(context: Context, requests: AsyncIterator[bytes], decode: Decode) -> Reply:
    """`RerankStream`: one answer when the client has sent its last text, the scores of all, the best first.

    Each text is ranked by the query beside it; texts with the same query go through the engine together. Waits for permits: for
    one before it reads, and then for those of its texts.
    """
    with context.counting_failures():
        _check_ranker(context)
    admission = context.service.admission
    async with admission.gathering:
        with context.counting_failures():
            async with admission.held(1):  # no longer: streams that hold one and wait for many would block each other
                texts = await _read_all(context, requests, decode)
        return await _rank(context, texts)


def _check_ranker(context: Context) -> None:
    """Raises WrongModel if the model cannot rank."""
    spec = context.service.model.spec
    try:
        rerank_task(spec, "", []).check(spec)
    except UnsupportedHead as error:
        raise WrongModel("model is not a classifier model" if spec.kind == "embedding" else str(error)) from None


async def _read_all(context: Context, requests: AsyncIterator[bytes], decode: Decode) -> list[Any]:
    """All messages of a stream. Raises NoInputs; RequestRefused above `max_rerank_documents` texts or the limit of bytes."""
    max_texts, max_bytes = context.server.max_rerank_documents, STREAM_PAYLOADS * context.server.payload_limit
    texts: list[Any] = []
    size = 0
    async for data in requests:
        texts.append(decode(data))
        size += len(data)
        if len(texts) > max_texts:
            raise RequestRefused(f"a stream of more than {max_texts} texts (max-rerank-documents)")
        if size > max_bytes:
            raise RequestRefused(f"a stream of more than {max_bytes} bytes ({STREAM_PAYLOADS} times payload-limit)")
    if not texts:
        raise NoInputs("`texts` cannot be empty")
    return texts


async def _rank(context: Context, texts: Sequence[Any]) -> Reply:
    began_ns = perf_counter_ns()
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, message in enumerate(texts):
        groups[message.query, message.truncate, message.truncation_direction].append(place)
    starts = (
        partial(_score_group, context, [texts[place] for place in places], texts[0].raw_scores) for places in groups.values()
    )
    scored = await in_order(starts, MAX_GROUPS)
    scores = np.empty(len(texts), dtype=np.float32)
    for places, (group_scores, _) in zip(groups.values(), scored, strict=True):
        scores[places] = group_scores
    ranks = [
        messages.Rank(index=place, text=texts[place].text if texts[0].return_text else None, score=scores[place])
        for place in best_first(scores).tolist()
    ]
    usage = replace(Usage.total([usage for _, usage in scored]), began_ns=began_ns)
    return _with_metadata(messages.RerankResponse(ranks=ranks).SerializeToString(), usage)


async def _score_group(context: Context, texts: Sequence[Any], raw_scores: bool) -> tuple[Floats, Usage]:
    """float32[n] of texts with one query, in their order."""
    request = rerank.DocumentsRequest(
        query=texts[0].query,
        documents=[message.text for message in texts],
        raw_scores=raw_scores,
        **_truncation(texts[0]),
    )
    async with context.service.admission.held(len(texts)):
        reply = await rerank.rerank_documents(context, request)
    assert reply.usage is not None
    scores = np.empty(len(texts), dtype=np.float32)
    for item in reply.answer["results"]:
        scores[item["index"]] = item["relevance_score"]
    return scores, reply.usage


DETAIL_BYTES = 4_000  # clients take some 8 kB of metadata, and what is not ASCII counts three times

CODES: Mapping[str, grpc.StatusCode] = {
    "Unhealthy": grpc.StatusCode.UNAVAILABLE,
    "Backend": grpc.StatusCode.FAILED_PRECONDITION,
    "Overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "Validation": grpc.StatusCode.INVALID_ARGUMENT,
    "Tokenizer": grpc.StatusCode.FAILED_PRECONDITION,
    "Empty": grpc.StatusCode.INVALID_ARGUMENT,
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "Forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "Unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "Store": grpc.StatusCode.UNAVAILABLE,
}


def status_of(error: HybridTeiError) -> tuple[grpc.StatusCode, str]:
    """Return (code, details) of an error."""
    if isinstance(error, Ended):
        return error.code, str(error)
    if isinstance(error, Garbage):  # INTERNAL: as gRPC's own documentation says
        return grpc.StatusCode.INTERNAL, str(error)
    row = row_of(error)
    return CODES[row.error_type], ("" if isinstance(error, WrongModel) else row.prefix) + str(error)


@asynccontextmanager
async def abort_on_error(call: Any) -> AsyncIterator[None]:
    """End the call with the status of an error that is raised within."""
    try:
        yield
    except HybridTeiError as error:
        log.error("%.1000s", error)
        code, details = status_of(error)
        await call.abort(code, fitting(details))
    except Exception as error:
        log.critical("unforeseen error in a gRPC call", exc_info=True)
        await call.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def fitting(details: str) -> str:
    """Cut details to what fits into a trailer, which writes all but printable ASCII as three characters a byte."""
    size = 0
    for place, character in enumerate(details):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if size > DETAIL_BYTES:
            return details[:place] + "…"
    return details
