"""`/search` over the server's vector store. A query is embedded in the express lane, like any short
request.

qdrant-client is an extra, so functions of this module import it locally.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput, RequestError, TooManyCandidates
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.inference.tasks.relevant import RelevantSpan
from hybridtei.inference.tasks.rerank import rerank_task
from hybridtei.models.text.reader import CHARACTERS_PER_TOKEN
from hybridtei.options import RankOptions, RankWeights, RelevantSpans
from hybridtei.outputs import Usage
from hybridtei.retrieval.search.options import (
    CUT,
    Budget,
    CheckedOptions,
    SearchFields,
    SearchHit,
    SearchResult,
    Stage,
)
from hybridtei.server.context import (
    NUMBERS_A_RANK,
    Context,
    Reply,
)
from hybridtei.server.models import Asked, Models, StoreContext
from hybridtei.server.ranking import rank
from hybridtei.server.routing import post

if TYPE_CHECKING:
    from hybridtei.retrieval.store.base import CollectionSchema

log = logging.getLogger(__name__)
Text = Annotated[str, Meta(max_length=100_000)]
# Spans of each hit
Spans = Sequence[Sequence[RelevantSpan]]


class SearchRequest(SearchFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `/search`: either `query` or `queries`."""

    collection: Annotated[str, Meta(description="Collection or alias to search.")]
    query: Annotated[Text | None, Meta(description="The query.")] = None
    queries: Annotated[
        list[Text] | None, Meta(description="Several queries, each with its own answer.")
    ] = None
    model: Annotated[
        str | None, Meta(description="The model that embeds the query [default: the collection's].")
    ] = None
    rerank: Annotated[
        bool | str,
        Meta(
            description=(
                "Rerank the best hits: true: by the first loaded reranker; or the name of one."
            )
        ),
    ] = False
    k: Annotated[int | None, Meta(description="Former name of `rrf_k`, read until 0.5.")] = None
    # Not decoded here, since its bytes are bounded first.
    filter: Annotated[
        Raw | UnsetType,
        Meta(
            description="A filter in Qdrant's format.",
            extra_json_schema={"type": ["object", "null"], "default": None},
        ),
    ] = UNSET
    relevant_spans: Annotated[
        RelevantSpans | None,
        Meta(
            description=(
                "List the sentences of each hit that match the query best; a second pass embeds "
                "the hits' texts."
            )
        ),
    ] = None

    @property
    def spans(self) -> RelevantSpans | None:
        return None if self.relevant_spans is None else self.relevant_spans.if_enabled

    @property
    def texts(self) -> list[str]:
        return [self.query] if self.query is not None else self.queries or []

    def check_texts(self) -> None:
        """Raises InvalidInput unless the request has exactly one of `query` and `queries`, and no
        empty text."""
        if (self.query is None) == (self.queries is None):
            raise InvalidInput("give either `query` or `queries`")
        if self.query is not None and not self.query.strip():
            raise InvalidInput("`query` is empty")
        for place, text in enumerate(self.queries or ()):
            if not text.strip():
                raise InvalidInput(f"`queries[{place}]` is empty")


class SpannedHit(SearchHit, frozen=True, omit_defaults=True):
    """A hit, and on request the sentences that match the query best."""

    relevant_spans: list[RelevantSpan] | None = None


class SearchResponse(Struct, frozen=True):
    """Answer for one query."""

    model: str
    mode: str
    hits: list[SpannedHit]
    stages: list[Stage]
    budget: Budget | None = None
    answerable: Annotated[
        bool | None,
        Meta(
            description="With `min_probability` or `rerank_threshold`: false if they drop every "
            "hit, or none was found."
        ),
    ] = None
    way: Annotated[
        str | None,
        Meta(
            description="The way of searching to which a curve belongs, if the collection has "
            "curves, or with `explain`."
        ),
    ] = None
    note: Annotated[
        str | None,
        Meta(description="Why `filter` found nothing, if no point has its key."),
    ] = None
    query_encoder: Annotated[
        str | None,
        Meta(description="table: the query's sparse vector came from the table."),
    ] = None


class SearchesResponse(Struct, frozen=True):
    """Answer for several queries."""

    results: list[SearchResponse]


# Hits of a request to explain: each has a sparse vector, and a text to tokenise
MAX_HIGHLIGHTED = 200
# Hits of a request to embed for `relevant_spans`, or to give `neighbours`
MAX_SPANNED = 100
# An answer with more bytes of payloads is written outside the event loop
LARGE_BYTES = 65_536
# Total characters of these texts
MAX_SPANNED_CHARACTERS = 2_000_000


@post("/search", SearchRequest, SearchResponse | SearchesResponse, role="search", source="store")
async def search(stores: StoreContext, request: SearchRequest) -> Reply:
    """Search a collection of the vector store: embed, find, fuse, rescore, rerank."""
    options = options_of(request, stores)
    ranker: Asked | None = None
    if request.rerank is not False:
        ranker = Asked(ranker_of(stores.models, request.rerank))
    else:
        options.check_unranked()
    work = partial(
        _searched,
        stores,
        request,
        options,
        ranker=ranker,
        ranking=CUT if ranker is None else options.ranking,
    )
    return await stores.run(
        len(request.texts), lambda: stores.schemas.reading(request.collection, work)
    )


async def _searched(
    stores: StoreContext,
    request: SearchRequest,
    options: CheckedOptions,
    schema: CollectionSchema,
    *,
    ranker: Asked | None,
    ranking: RankOptions,
) -> Reply:
    """Embed, find and write. Repeatable."""
    context = stores.embedder(schema)
    # The model reads no more of a query, so nothing else does
    longest = context.service.reader.max_input_length * CHARACTERS_PER_TOKEN
    spans, texts = request.spans, [text[:longest] for text in request.texts]
    if spans is not None and Head.MULTIVECTOR not in context.heads:
        raise InvalidInput(
            f"`relevant_spans` needs multi-vectors, which the model `{context.served_name}` does "
            "not give"
        )
    from hybridtei.retrieval.search.searcher import Searcher
    from hybridtei.retrieval.store.base import PayloadBudget

    model = Asked(context, is_batch=request.query is None)
    budget = PayloadBudget(stores.server.max_search_bytes)
    depth = max(stores.server.max_search_points // max(len(texts), 1), 1)
    schemas = stores.schemas
    searcher = Searcher(
        schemas.store,
        model,
        schemas=schemas,
        budget=budget,
        max_points=depth,
        aside=stores.bounds.aside.run,
    )
    fit = await searcher.fit(request.collection, options, schema)
    try:
        embedded = await searcher.embed(request.collection, texts, options, fit=fit)
    except RequestError as error:
        raise error.named("query" if request.queries is None else "queries") from None
    find = partial(
        searcher.find,
        request.collection,
        options=options,
        ranker=ranker,
        ranking=ranking,
        fit=fit,
    )
    searches = [find(text, embedded, row) for row, text in enumerate(texts)]
    results = await asyncio.gather(*searches)
    spans_of = [] if spans is None else await _spans(context, request, results, spans)
    write = partial(
        _written, context, request, results, spans_of, usage=model.usage, options=options
    )
    if options.highlights or budget.spent > LARGE_BYTES:
        answers = await stores.bounds.aside.run(write)
    else:
        answers = write()
    numbers = _numbers(results, spans_of) + budget.spent // BYTES_PER_NUMBER
    answer = answers[0] if request.query is not None else {"results": answers}
    return Reply(answer, model.usage, numbers)


def _written(
    context: Context,
    request: SearchRequest,
    results: Sequence[SearchResult],
    spans: Sequence[Spans],
    *,
    usage: Usage,
    options: CheckedOptions,
) -> list[dict[str, Any]]:
    """The answers of all queries, as JSON types."""
    answers = [_result(context, result, usage, options) for result in results]
    for answer, spans_of_hits in zip(answers, spans, strict=False):
        _add_spans(answer["hits"], spans_of_hits, request.with_payload)
    return answers


def _numbers(results: Sequence[SearchResult], spans: Sequence[Spans]) -> int:
    """The cost of writing the hits with their highlights and spans, in numbers."""
    items = 0
    for result in results:
        items += len(result.hits)
        for hit in result.hits:
            items += len(hit.highlights or ())
    for spans_of_hits in spans:
        items += sum(map(len, spans_of_hits))
    return NUMBERS_A_RANK * items


async def _spans(
    context: Context,
    request: SearchRequest,
    results: Sequence[SearchResult],
    options: RelevantSpans,
) -> list[Spans]:
    """The best spans of each query's hits, from a second pass over their texts. Raises InvalidInput
    if no hit has a text."""
    from hybridtei.retrieval.store.own import text_of

    field = request.text_field
    texts = [[text_of(hit.payload, field) for hit in result.hits] for result in results]
    count = sum(map(len, texts))
    if count and not any(map(any, texts)):
        raise InvalidInput(
            f"`relevant_spans`: nothing that was found in `{request.collection}` has a `{field}` "
            "in its payload"
        )
    longest = MAX_SPANNED_CHARACTERS // max(count, 1)

    async def of_hits(query: str, texts: Sequence[str]) -> Spans:
        documents = [text[:longest] for text in texts if text]
        if not documents:
            return [()] * len(texts)
        by_vectors = RankOptions(
            weights=RankWeights(
                0.0,
                0.0,
                1.0,
            ),
            relevant_spans=options,
        )
        task = rerank_task(
            context.service.model.spec,
            query,
            documents,
            by_vectors,
        )
        scored, _ = await rank(context, task)
        spans = iter(scored.spans)
        # A hit without a text was not scored
        return [next(spans) if text else () for text in texts]

    return await asyncio.gather(*map(of_hits, request.texts, texts))


def options_of(request: SearchRequest, stores: StoreContext) -> CheckedOptions:
    """The request's options: all of its checks, before the store is called. Raises InvalidInput,
    TooManyInputs, TooManyCandidates."""
    from hybridtei.retrieval.store.own import text_keys
    from hybridtei.retrieval.store.query import filter_from

    queries = 1
    if request.queries is not None:
        queries = len(request.queries)
        stores.models.default.check_batch(queries)
    _check_candidates(request, queries, stores.server.max_search_points)
    request.check_texts()
    query_filter = None
    if request.filter:
        query_filter = filter_from(request.filter)
    options = CheckedOptions.of(request, query_filter=query_filter)
    if request.k is not None:
        if request.rrf_k is not None:
            raise InvalidInput("`k` is the former name of `rrf_k`: give one of them")
        _tell_former_name()
        options = structs.replace(options, rrf_k=request.k)
    if request.spans is None or options.with_payload is True:
        return options
    keys = [*(options.with_payload or ()), *text_keys(request.text_field)]
    return structs.replace(options, with_payload=keys)


@cache
def _tell_former_name() -> None:
    """Log, once in the life of this process, that a client uses `k`."""
    log.warning("/search: a client sends `k`, which 0.5 will refuse: its name is `rrf_k` now")


def _check_candidates(request: SearchRequest, queries: int, most: int) -> None:
    """Raises TooManyCandidates, naming the field, if a search would examine more than `most`
    points; InvalidInput if it would explain too many hits."""
    of_all = f" for each of {queries} `queries`" if queries > 1 else ""
    reach = {
        "`prefetch_limit`": request.prefetch_limit,
        "`offset` + `limit`": request.offset + request.limit,
    }
    if request.rerank is not False:
        reach["`rerank_limit`"] = request.rerank_limit
    name = max(reach, key=reach.__getitem__)
    if queries * reach[name] > most:
        raise TooManyCandidates(
            f"{name} is {reach[name]}{of_all}; one search looks at {most} points at most "
            "(max-search-points)"
        )
    bounds = {}
    if request.highlights:
        bounds["highlights"] = MAX_HIGHLIGHTED
    if request.neighbours is not None:
        bounds["neighbours"] = MAX_SPANNED
    if request.spans is not None:
        bounds["relevant_spans"] = MAX_SPANNED
    for field, hits in bounds.items():
        if queries * request.limit > hits:
            raise InvalidInput(
                f"`limit` is {request.limit}{of_all}; with `{field}`, {hits} hits are the most"
            )


def ranker_of(models: Models, name: bool | str) -> Context:
    """The reranker of this name, or the first one. Raises InvalidInput if none is loaded;
    UnknownModel."""
    if isinstance(name, str):
        return models.named(name)
    for context in models.ready:
        if context.service.model.spec.role == "reranker":
            return context
    raise InvalidInput("`rerank`: no reranker is loaded; `rescore` ranks by multi-vectors")


def _result(
    context: Context, results: SearchResult, usage: Usage, options: CheckedOptions
) -> dict[str, Any]:
    stages = usage.timings
    spent_ms = (stages.tokenization_ns + stages.queue_ns + stages.inference_ns) / 1e6
    embed = {"name": "embed", "milliseconds": round(spent_ms, 3), "candidates": usage.load.inputs}
    answer = {"model": context.served_name, **results.as_dict()}
    answer["stages"] = [embed, *answer["stages"]]
    if options.query_encoder == "table":
        answer["query_encoder"] = "table"
    return answer


def _add_spans(hits: list[dict[str, Any]], of_hits: Spans, with_payload: bool | list[str]) -> None:
    """Add spans to hits, and reduce payloads to the requested keys."""
    for hit, spans in zip(hits, of_hits, strict=True):
        if with_payload is not True:
            hit["payload"] = {
                name: value
                for name, value in hit["payload"].items()
                if with_payload and name in with_payload
            }
        if spans:
            hit["relevant_spans"] = spans
