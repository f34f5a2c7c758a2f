"""Reranking, in TEI's words, and in one object for all who send `documents`: Cohere, Jina, Voyage, vLLM, infinity, Weaviate.

Ten thousand documents go through in parts, of which two are inside at a time: one is tokenised while the other runs.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from msgspec import UNSET

from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.engine.service import Answered
from hybridtei.errors import InvalidInput
from hybridtei.observability.tracing import handler
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.server.api.envelope import envelope, used
from hybridtei.server.api.rerank import DocumentsRequest, RerankRequest, RerankWeights, check_instruction, text_of
from hybridtei.server.api.tei import direction
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.errors import NoInputs, TooManyDocuments
from hybridtei.server.observe import Load, Usage
from hybridtei.server.parts import PARTS_INSIDE, in_order, mean_timings, plan
from hybridtei.tasks.embed import Model
from hybridtei.tasks.rerank import Rerank, RerankByVectors, Scored, Weights, rerank_task
from hybridtei.tasks.scores import best_first
from hybridtei.text.reader import CHARACTERS_PER_TOKEN

PART_DOCUMENTS = 64
NUMBERS_A_RANK = 40  # as which an item counts that is built and written
DOCUMENTS_PER_UNIT = 100  # of what Cohere bills by

Ranking = Rerank | RerankByVectors


@handler("rerank")
async def rerank(context: Context, request: RerankRequest) -> Reply:
    """`/rerank` with `texts`: the best first, ties in reverse order."""
    with context.counting_failures():
        if not request.texts:
            raise NoInputs("`texts` cannot be empty")
        task = _task(context, request.query, request.texts, request, truncate=request.truncate)
        task.check(context.service.model.spec)
    load = _load(request.query, request.texts)
    permits = load.inputs if context.plan(load.inputs) is None else _window(context, load.inputs)
    work = _Work(context, task, permits=permits)
    scores, usage = await context.measured(work.run, load, scope="predict")

    def write(scores: Floats, _: Usage) -> list[dict[str, Any]]:
        if not request.return_text:
            return [{"index": i, "score": scores[i]} for i in best_first(scores).tolist()]
        return [{"index": i, "text": request.texts[i], "score": scores[i]} for i in best_first(scores).tolist()]

    return await context.reply(write, scores, usage, NUMBERS_A_RANK * len(scores))


@handler("rerank")
async def rerank_documents(context: Context, request: DocumentsRequest, *, plain: bool = False) -> Reply:
    """`/rerank`, `/v1/rerank` and `/v2/rerank` with `documents`. `plain`: give them back as strings, not as objects."""
    given = request.documents
    with context.counting_failures():
        if not given:
            raise NoInputs("`documents` cannot be empty")
        limit = context.server.max_rerank_documents
        if len(given) > limit:
            raise TooManyDocuments(f"`documents` holds {len(given)} documents > maximum allowed {limit} (max-rerank-documents)")
        fields = request.fields
        documents = [text_of(document, place, fields) for place, document in enumerate(given)]
        if request.return_documents or request.by_property is not UNSET:
            _check_returnable(given)
        truncate = request.truncation if request.truncate is None else request.truncate
        task = _task(context, request.query, documents, request, truncate=truncate)
        task.check(context.service.model.spec)
    load = _load(request.query, documents)
    work = _Work(context, task, permits=_window(context, len(documents)), document_tokens=request.max_tokens_per_doc or None)
    scores, usage = await context.measured(work.run, load, scope="predict", checked=False)

    def write(scores: Floats, usage: Usage) -> dict[str, Any]:
        items: list[dict[str, Any]] = [
            {"index": i, "relevance_score": scores[i]} for i in best_first(scores).tolist()[: request.most]
        ]
        if request.return_documents:
            for item in items:
                item["document"] = _given_back(given[item["index"]], plain=plain)
        return _object(context, request, items, scores, usage)

    return await context.reply(write, scores, usage, NUMBERS_A_RANK * len(scores))


async def rank_texts(context: Context, query: str, documents: Sequence[str]) -> Floats:
    """A score for each document, as `/rerank` gives it: what ranks the hits of a search. Raises UnsupportedHead."""
    task = rerank_task(context.service.model.spec, query, documents, truncate=True)
    task.check(context.service.model.spec)
    work = _Work(context, task, permits=_window(context, len(documents)))
    scores, _ = await context.measured(work.run, _load(query, documents), scope="predict", checked=False)
    return scores


def _window(context: Context, documents: int) -> int:
    """How many are inside at once, at most."""
    return plan(documents, largest=PART_DOCUMENTS, permits=context.service.config.max_concurrent_requests).permits


def _check_returnable(documents: Sequence[str | dict[str, Any]]) -> None:
    """JSON can be read that cannot be written: numbers beyond 64 bits, hundreds of levels. Raises InvalidInput."""
    for place, document in enumerate(documents):
        if isinstance(document, dict):
            try:
                orjson.dumps(document)
            except TypeError as error:
                raise InvalidInput(f"`documents[{place}]` cannot be given back: {error}") from None


def _given_back(document: str | dict[str, Any], *, plain: bool) -> Any:
    if isinstance(document, str):
        return document if plain else {"text": document}
    return document.get("text", "") if plain else document


def _object(
    context: Context, request: DocumentsRequest, items: list[dict[str, Any]], scores: Floats, usage: Usage
) -> dict[str, Any]:
    answer: dict[str, Any] = {**envelope(context, "rerank", "rerank"), "results": items, "data": items}
    if request.by_property is not UNSET:  # Weaviate's; it goes by place
        pairs = zip(request.documents, scores, strict=True)
        answer["query"] = request.query
        answer["scores"] = [{"document": _given_back(text, plain=True), "score": score} for text, score in pairs]
    answer["usage"] = used(usage)
    answer["meta"] = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": -(-len(scores) // DOCUMENTS_PER_UNIT)},
        "tokens": {"input_tokens": usage.tokens, "output_tokens": 0},
    }
    return answer


def _task(
    context: Context,
    query: str,
    documents: Sequence[str],
    request: RerankRequest | DocumentsRequest,
    *,
    truncate: bool | None,
) -> Ranking:
    check_instruction(request.instruction, len(documents))
    shares = request.weights
    return rerank_task(
        context.service.model.spec,
        query,
        documents,
        truncate=context.truncate(truncate),
        direction=direction(request.truncation_direction),
        raw_scores=request.raw_scores is True,
        instruction=request.instruction,
        weights=Weights(shares.dense, shares.sparse, shares.multivector) if isinstance(shares, RerankWeights) else shares,
    )


def _load(query: str, documents: Sequence[str]) -> Load:
    return Load(len(documents), len(query) * len(documents) + sum(map(len, documents)), is_batch=True)


@dataclass(frozen=True, slots=True)
class _Capped:
    """A ranking whose documents are cut to so many tokens each, whatever else is cut."""

    task: Ranking
    tokens: int

    @property
    def heads(self) -> frozenset[Head]:
        return self.task.heads

    def check(self, spec: ModelSpec) -> None:
        self.task.check(spec)

    def prepare(self, model: Model) -> list[Encoding]:
        texts = [text[: self.tokens * CHARACTERS_PER_TOKEN] for text in self.task.documents]
        raws = model.reader.tokenizer.encode(texts, add_special_tokens=False, offsets=True)
        cut = [
            text if len(raw) <= self.tokens else text[: raw.offsets[self.tokens - 1][1]]
            for text, raw in zip(texts, raws, strict=True)
        ]
        return replace(self.task, documents=cut).prepare(model)

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Scored:
        return self.task.finish(model, encodings, outputs)


@dataclass(frozen=True, slots=True)
class _Work:
    """A ranking through the engine, in parts. `permits` are held until the last is done, and taken before the first begins."""

    context: Context
    task: Ranking
    permits: int
    document_tokens: int | None = None

    async def run(self) -> Answered[Floats]:
        """Raises what the first part that fails raises."""
        with self.context.service.admission.inside(self.permits, turns=self.permits < len(self.task.documents)):
            parts = self._parts()
            first = await self._part(next(parts))
            starts = (partial(self._part, part.knowing(first.answer.query)) for part in parts)
            done = [first, *await in_order(starts, PARTS_INSIDE)]
        return together(done, len(self.task.documents))

    def _parts(self) -> Iterator[Ranking]:
        documents = self.task.documents
        for begin in range(0, len(documents), PART_DOCUMENTS):
            yield from replace(self.task, documents=documents[begin : begin + PART_DOCUMENTS]).parts()

    def _part(self, part: Ranking) -> Coroutine[Any, Any, Answered[Scored]]:
        task = part if self.document_tokens is None else _Capped(part, self.document_tokens)
        return self.context.service.run(task, inputs=0)


def together(parts: Sequence[Answered[Scored]], inputs: int) -> Answered[Floats]:
    """All scores; times as if it had been one part: tokenisation a document, the others as a document's mean."""
    timings = mean_timings([(len(part.answer.scores), part.timings) for part in parts], inputs)
    scores = np.concatenate([part.answer.scores for part in parts])
    return Answered(scores, [length for part in parts for length in part.lengths], timings)
