"""Reranking: TEI's clients send `texts`; clients of Cohere, Jina, Voyage, vLLM, infinity and
Weaviate send `documents`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, field

from hybridtei.errors import InvalidInput, NoInputs, TooManyDocuments
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.inference.tasks.relevant import RelevantSpan
from hybridtei.inference.tasks.rerank import RerankByVectors, Scored
from hybridtei.options import (
    BudgetMs,
    GivenWeights,
    Instruction,
    MaxChunks,
    MaxTokens,
    RankOptions,
    RelevantSpans,
    Size,
    Truncate,
)
from hybridtei.outputs import Floats, Usage
from hybridtei.retrieval.search.options import Budget
from hybridtei.server.api.tei import (
    DIRECTIONS,
    NOT_EMPTY,
    Activation,
    CutSide,
    Enveloped,
    PromptTokens,
    ServedModel,
    TruncationSide,
    UseActivation,
    options_of,
)
from hybridtei.server.context import (
    CHUNK_DOCUMENTS,
    NUMBERS_A_RANK,
    Context,
    Reply,
    checked,
    envelope,
    load_of_pairs,
    usage_of,
)
from hybridtei.server.http.body import decode_in_turn, decode_peers, kind_of
from hybridtei.server.models import RANK
from hybridtei.server.ranking import rank
from hybridtei.server.routing import post
from hybridtei.server.wires import (
    ClientsErrorResponse,
    Document,
    DocumentsErrorResponse,
    Form,
    Wire,
)

# The event loop looks up each field in each of thousands of documents
MAX_RANK_FIELDS = 32


class RerankRequest(Struct, frozen=True, kw_only=True):
    """Request of `/rerank` with `texts`."""

    query: str
    texts: Annotated[list[str], NOT_EMPTY]
    truncate: Truncate = None
    truncation_direction: TruncationSide = "Right"
    raw_scores: Annotated[bool, Meta(description="Give logits instead of probabilities.")] = False
    return_text: Annotated[bool, Meta(description="Repeat each text in the answer.")] = False
    instruction: Instruction = None
    weights: GivenWeights = None
    max_tokens_per_doc: MaxTokens = None
    max_chunks_per_doc: MaxChunks = None
    budget_ms: BudgetMs = None

    @property
    def options(self) -> RankOptions:
        """A budget of time begins now."""
        options = options_of(
            RankOptions,
            self,
            truncation_direction=DIRECTIONS[self.truncation_direction],
        )
        return options if self.budget_ms is None else options.begun()


class Rank(Struct, frozen=True, omit_defaults=True):
    """A text's place in the request, and its score."""

    index: int
    score: float
    text: str | None = None


class DocumentsRequest(Struct, frozen=True, kw_only=True):
    """Request of `/rerank`, `/v1/rerank` and `/v2/rerank` with `documents`."""

    query: str
    documents: Annotated[
        list[str | dict[str, Any]],
        NOT_EMPTY,
        Meta(description="Texts, or objects with `text` or the `rank_fields`."),
    ]
    model: ServedModel = None
    top_n: Annotated[Size | None, Meta(description="Number of results [default, and 0: all].")] = (
        None
    )
    top_k: Annotated[Size | None, Meta(description="`top_n` under Voyage's name.")] = None
    return_documents: Annotated[
        bool | None, Meta(description="Repeat each document in the answer.")
    ] = None
    rank_fields: Annotated[
        Annotated[list[str], Meta(max_length=MAX_RANK_FIELDS)] | None,
        Meta(
            description=(
                "For documents that are objects: up to 32 fields to read, in this order [default: "
                "text]."
            )
        ),
    ] = None
    max_tokens_per_doc: MaxTokens = None
    max_chunks_per_doc: MaxChunks = None
    raw_scores: Annotated[
        bool | UnsetType | None,
        Meta(
            description=(
                "Give logits instead of probabilities, and a model's similarities as they are "
                "instead of within 0 and 1."
            )
        ),
    ] = UNSET
    truncate: Truncate = None
    truncation: Annotated[bool | None, Meta(description="`truncate` under Voyage's name.")] = None
    truncation_direction: TruncationSide = "Right"
    truncation_side: CutSide = None
    use_activation: UseActivation = None
    activation: Activation = None
    return_embeddings: Form = None
    truncate_prompt_tokens: PromptTokens = None
    instruction: Instruction = None
    weights: GivenWeights = None
    relevant_spans: Annotated[
        RelevantSpans | None,
        Meta(
            description=(
                "List the sentences behind each score, by the best matches of multi-vectors."
            )
        ),
    ] = None
    budget_ms: BudgetMs = None
    by_property: Annotated[
        Any, Meta(description="Weaviate's; adds `scores` in the order of `documents`.")
    ] = field(default=UNSET, name="property")

    @property
    def options(self) -> RankOptions:
        """A budget of time begins now."""
        max_tokens = self.truncate_prompt_tokens
        return options_of(
            RankOptions,
            self,
            truncate=max_tokens is not None or self.truncate,
            truncation_direction=DIRECTIONS[self.truncation_side or self.truncation_direction],
            max_tokens=max_tokens,
            raw_scores=self.raw_scores is True or self.use_activation is False,
            relevant_spans=self.relevant_spans and self.relevant_spans.if_enabled,
        ).begun()


class RankedDocument(Struct, frozen=True, omit_defaults=True):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: dict[str, Any] | str | None = None
    relevant_spans: list[RelevantSpan] | None = None
    window: Annotated[
        tuple[int, int] | None,
        Meta(description="The characters of the best window, if it was read in several."),
    ] = None


class DocumentsResponse(Enveloped, frozen=True, omit_defaults=True):
    """Answer to `documents`. Voyage's clients read `data`, where a document is a text, all others
    `results`."""

    object: Literal["rerank"]
    results: list[RankedDocument]
    data: list[RankedDocument]
    meta: dict[str, Any]
    query: str | None = None
    scores: list[dict[str, Any]] | None = None
    budget: Budget | None = None


def as_relevance(task: RerankByVectors, scored: Scored) -> Floats:
    """Similarities -> numbers between 0 and 1 in the same order: `1/2 + 2 d / (1 + 4 |d|)`, where
    `d` is the distance from 1/2. It leaves 1/4, 1/2 and 3/4 where they are. A sum over the query's
    token vectors is divided by their number first."""
    scores, query = scored.scores, scored.query
    if not task.is_mean and query is not None and query.multivector is not None:
        scores = scores / np.float32(max(len(query.multivector.row(0)), 1))
    distances = scores - np.float32(0.5)
    return np.float32(0.5) + 2 * distances / (1 + 4 * abs(distances))


def texts_of(documents: Sequence[str | dict[str, Any]], fields: Sequence[str]) -> list[str]:
    """The texts to rank. Raises InvalidInput."""
    return [text_of(document, place, fields) for place, document in enumerate(documents)]


def text_of(document: str | dict[str, Any], place: int, fields: Sequence[str]) -> str:
    """The text to rank: a document's `text`, or the named fields, one a line, each once. Raises
    InvalidInput."""
    if isinstance(document, str):
        return document
    if not fields:
        text = document.get("text")
        if not isinstance(text, str):
            raise InvalidInput(
                f"`documents[{place}]` should be a text, or an object with a `text`; or name "
                "`rank_fields`"
            )
        return text
    values = [document[field] for field in fields if document.get(field) is not None]
    if not values:
        raise InvalidInput(
            f"`documents[{place}]` has none of the `rank_fields`: {', '.join(fields)}"
        )
    return "\n".join(map(str, values))


# Cohere bills by this
DOCUMENTS_PER_UNIT = 100


@post("/rerank", RerankRequest, list[Rank], capability=RANK, is_tei=True, only_tei=True)
async def rerank(context: Context, request: RerankRequest) -> Reply:
    """Reranking of `texts`: the best first, ties in reverse order."""
    with context.counting_failures():
        if not request.texts:
            raise NoInputs("`texts` cannot be empty")
        task = context.ranking(
            request.query,
            request.texts,
            request.options,
        )
    load = load_of_pairs(request.query, request.texts)
    split = context.splits(load.inputs)
    if task.options.deadline_ns is None:
        bounds = context.bounds_of_ranking(task, CHUNK_DOCUMENTS if split else None)
        scored, usage = await context.run(task, load, bounds, scope="predict", check=checked)
    else:
        scored, usage = await rank(context, task, "texts")

    def write(scores: Floats, _: Usage) -> list[dict[str, Any]]:
        if not request.return_text:
            return [{"index": i, "score": scores[i]} for i in scored.order]
        return [{"index": i, "text": request.texts[i], "score": scores[i]} for i in scored.order]

    returned = sum(map(len, request.texts)) if request.return_text else 0
    numbers = NUMBERS_A_RANK * load.inputs + returned // BYTES_PER_NUMBER
    return await context.reply(write, scored.scores, usage, numbers)


RANKED = Wire(
    tried="cohere, voyageai, litellm (cohere, fireworks_ai, jina_ai, voyage), Dify, Open WebUI",
    error=ClientsErrorResponse,
    older={"top_k": "top_n", "truncation": "truncate", "activation": "use_activation"},
    forms={"return_embeddings": (False,)},
    document="object",
)
COHERE_2 = replace(RANKED, tried="cohere, litellm (cohere), Milvus", document=None)
# Weaviate's module fails on an `error` that is no text
BARE = replace(
    RANKED, tried="infinity_client, litellm (hosted_vllm), Weaviate", error=DocumentsErrorResponse
)
ranking = partial(
    post, request=DocumentsRequest, answer=DocumentsResponse, span="rerank", capability=RANK
)


@ranking("/v2/rerank", wire=COHERE_2)
async def rerank_as_cohere(context: Context, request: DocumentsRequest) -> Reply:
    """Reranking of `documents`, which the answer does not repeat by default."""
    return await rerank_documents(context, request, COHERE_2.document)


@ranking(["/v1/reranking", "/reranking"], in_schema=False, wire=RANKED)
@ranking("/v1/rerank", wire=RANKED)
async def rerank_documents(
    context: Context, request: DocumentsRequest, form: Document = RANKED.document
) -> Reply:
    """Reranking of `documents`. The answer repeats them unless `return_documents` is false."""
    options, repeats = request.options, request.return_documents
    if repeats is None:
        repeats = form is not None
    raw = request.documents
    with context.counting_failures():
        if not raw:
            raise NoInputs("`documents` cannot be empty")
        limit = context.server.max_rerank_documents
        if len(raw) > limit:
            raise TooManyDocuments(
                f"`documents` holds {len(raw)} documents > maximum allowed {limit} "
                "(max-rerank-documents)"
            )
        fields = list(dict.fromkeys(request.rank_fields or ()))
        if fields:
            # A field may be any JSON, whose text takes long
            documents = await asyncio.to_thread(texts_of, raw, fields)
        else:
            documents = texts_of(raw, fields)
        returned_bytes = 0
        if request.return_documents or request.by_property is not UNSET:
            returned_bytes = 2 * _returnable_bytes(raw)
        elif repeats:
            returned_bytes = 2 * sum(map(len, documents))
        task = context.ranking(request.query, documents, options)
    scored, usage = await rank(context, task, "documents")

    def write(scores: Floats, usage: Usage) -> dict[str, Any]:
        if isinstance(task, RerankByVectors) and not options.raw_scores:
            scores = as_relevance(task, scored)
        items: list[dict[str, Any]] = [
            {"index": i, "relevance_score": scores[i]}
            for i in scored.order[: request.top_n or None]
        ]
        if repeats:
            # Without `return_documents` a document is its text
            answered = raw if request.return_documents else documents
            for item in items:
                item["document"] = _returned(answered[item["index"]], plain=form == "text")
        for item in items if scored.spans else ():
            if spans := scored.spans[item["index"]]:
                item["relevant_spans"] = spans
        for item in items if scored.windows else ():
            if window := scored.windows[item["index"]]:
                item["window"] = window
        answer = _object(context, request, items, scores, usage)
        if repeats:
            answer["data"] = [item | {"document": documents[item["index"]]} for item in items]
        if options.deadline_ns is not None:
            answer["budget"] = Budget.spent(len(documents), scored.unscored)
        return answer

    numbers = (
        NUMBERS_A_RANK * len(documents)
        + 3 * sum(map(len, scored.spans))
        + returned_bytes // BYTES_PER_NUMBER
    )
    return await context.reply(write, scored.scores, usage, numbers)


BY_FIELD: dict[str, type[RerankRequest | DocumentsRequest]] = {
    "texts": RerankRequest,
    "documents": DocumentsRequest,
}


async def rerank_by_fields(context: Context, body: bytes) -> Reply:
    """Choose the API: `texts` is TEI's, `documents` the others', unless the server answers as
    TEI."""
    request: RerankRequest | DocumentsRequest
    if context.server.as_tei or kind_of(body, BY_FIELD) is RerankRequest:
        request = await decode_in_turn(body, RerankRequest)
    else:
        request = BARE.read(await decode_in_turn(body, DocumentsRequest, decode_peers))
    return await rerank_either(context, request)


@post(
    "/rerank",
    BY_FIELD,
    list[Rank] | DocumentsResponse,
    span="rerank",
    capability=RANK,
    is_tei=True,
    shared_wire=BARE,
)
async def rerank_either(context: Context, request: RerankRequest | DocumentsRequest) -> Reply:
    """Reranking of `texts` or `documents`."""
    if isinstance(request, RerankRequest):
        return await rerank(context, request)
    # infinity's client always sends `raw_scores` and needs a text; vLLM's never sends it
    if context.server.rerank_documents_as == "string" or request.raw_scores is not UNSET:
        return await rerank_documents(context, request, "text")
    return await rerank_documents(context, request, BARE.document)


def _returnable_bytes(documents: Sequence[str | dict[str, Any]]) -> int:
    """The approximate size of the documents as JSON. Raises InvalidInput for values that msgspec
    reads but cannot write: integers beyond 64 bits, hundreds of levels."""
    size = 0
    for place, document in enumerate(documents):
        if isinstance(document, dict):
            try:
                size += len(orjson.dumps(document))
            except TypeError as error:
                raise InvalidInput(f"`documents[{place}]` cannot be given back: {error}") from None
        else:
            size += len(document)
    return size


def _returned(document: str | dict[str, Any], *, plain: bool) -> Any:
    if isinstance(document, str):
        return document if plain else {"text": document}
    return document.get("text", "") if plain else document


def _object(
    context: Context,
    request: DocumentsRequest,
    items: list[dict[str, Any]],
    scores: Floats,
    usage: Usage,
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        **envelope(context, "rerank", "rerank"),
        "results": items,
        "data": items,
    }
    # Weaviate matches scores to documents by place
    if request.by_property is not UNSET:
        pairs = zip(request.documents, scores, strict=True)
        answer["query"] = request.query
        answer["scores"] = [
            {"document": _returned(text, plain=True), "score": score} for text, score in pairs
        ]
    answer["usage"] = usage_of(context, usage)
    answer["meta"] = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": -(-len(scores) // DOCUMENTS_PER_UNIT)},
        "tokens": {"input_tokens": usage.tokens, "output_tokens": 0},
    }
    return answer
