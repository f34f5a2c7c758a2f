"""`/search` over the server's vector store. A query is embedded in the express lane, like any short request.

qdrant-client is an extra, so functions of this module import it locally.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, structs

from hybridtei.batch import Head
from hybridtei.config import ServerConfig
from hybridtei.errors import InvalidInput, Overloaded, TooManyCandidates
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.relevant import RelevantSpan, RelevantSpans
from hybridtei.inference.tasks.rerank import RankWeights, rerank_task
from hybridtei.models.fingerprint import model_hash
from hybridtei.outputs import Embeddings, Floats, Load, Usage
from hybridtei.retrieval.search.options import (
    SearchFields,
    SearchHit,
    SearchOptions,
    SearchResult,
    Stage,
)
from hybridtei.server.context import NUMBERS_A_RANK, Context, Reply, load_of_pairs
from hybridtei.server.models import Models, StoreContext
from hybridtei.server.routing import post

if TYPE_CHECKING:
    from hybridtei.retrieval.search.searcher import Rank
    from hybridtei.retrieval.store.base import CollectionSchema


Text = Annotated[str, Meta(max_length=100_000)]
Spans = Sequence[Sequence[RelevantSpan]]  # spans of each hit
TEXT = "text"  # a payload's key, `SearchOptions.text_field`


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
            description="Rerank the best hits: true: by the first loaded reranker; or the name of one."
        ),
    ] = False
    filter: Annotated[dict[str, Any] | None, Meta(description="A filter in Qdrant's format.")] = (
        None
    )
    relevant_spans: Annotated[
        RelevantSpans | None,
        Meta(
            description="List the sentences of each hit that match the query best; a second pass embeds the hits' texts."
        ),
    ] = None

    @property
    def spans(self) -> RelevantSpans | None:
        return None if self.relevant_spans is None else self.relevant_spans.if_enabled

    @property
    def texts(self) -> list[str]:
        """Raises InvalidInput unless the request has exactly one of `query` and `queries`."""
        if (self.query is None) == (self.queries is None):
            raise InvalidInput("give either `query` or `queries`")
        texts = [self.query] if self.query is not None else self.queries or []
        for place, text in enumerate(texts):
            if not text.strip():
                raise InvalidInput(
                    f"`{'query' if self.query is not None else f'queries[{place}]'}` is empty"
                )
        return texts


class SpannedHit(SearchHit, frozen=True, omit_defaults=True):
    """A hit, and on request the sentences that match the query best."""

    relevant_spans: list[RelevantSpan] | None = None


class SearchResponse(Struct, frozen=True):
    """Answer for one query."""

    model: str
    mode: str
    hits: list[SpannedHit]
    stages: list[Stage]
    query_encoder: Annotated[
        str | None,
        Meta(
            description="table: the query's sparse vector came from the table, on request or under load."
        ),
    ] = None


class SearchesResponse(Struct, frozen=True):
    """Answer for several queries."""

    results: list[SearchResponse]


# The options that replace a request's if the model is at capacity and `--table-under-load` is set.
BY_TABLE: dict[str, Any] = {
    "mode": "sparse",
    "query_encoder": "table",
    "rescore": False,
    "score_threshold": None,  # its scale differs for sparse scores
    "k": None,
    "weights": None,
    "legs": None,
}
MAX_HIGHLIGHTED = (
    200  # hits of a request to explain: each has a sparse vector, and a text to tokenise
)
MAX_SPANNED = 100  # hits of a request to embed for `relevant_spans`
MAX_SPANNED_CHARACTERS = 2_000_000  # total characters of these texts


@post("/search", SearchRequest, SearchResponse | SearchesResponse, role="search", source="store")
async def search(stores: StoreContext, request: SearchRequest) -> Reply:
    """Search a collection of the vector store: embed, find, fuse, rescore, rerank."""
    if request.query is None:
        stores.models.default.check_batch(len(request.texts))
    options = options_of(request, stores.server)
    rank = ranker(stores.models, request.rerank)
    searched = partial(_searched, stores, request, options, rank)
    return await stores.run(
        len(request.texts), lambda: stores.schemas.reading(request.collection, searched)
    )


async def _searched(
    stores: StoreContext,
    request: SearchRequest,
    options: SearchOptions,
    rank: Rank | None,
    schema: CollectionSchema,
) -> Reply:
    from hybridtei.retrieval.search.searcher import QueryModel, Searcher
    from hybridtei.retrieval.store.base import PayloadBudget
    from hybridtei.retrieval.store.collection import common_heads

    texts = request.texts
    context = stores.embedder(schema)
    if request.spans is not None and Head.MULTIVECTOR not in context.heads:
        raise InvalidInput(
            f"`relevant_spans` needs multi-vectors, which the model `{context.served_name}` does not give"
        )
    usages: list[Usage] = []

    async def embed(queries: Sequence[str], heads: frozenset[Head]) -> Embeddings:
        task = Embed(list(queries), heads, input_type="query")
        load = Load(len(queries), sum(map(len, queries)), is_batch=request.query is None)
        answer, usage = await context.run(task, load)
        usages.append(usage)
        return answer

    tokenizer, spec = context.service.tokenizer, context.service.model.spec

    async def look_up(queries: Sequence[str]) -> Embeddings:
        answer, usage = await context.look_up(list(queries), is_batch=request.query is None)
        usages.append(usage)
        return answer

    model = QueryModel(
        context.model.model_id,
        spec,
        embed,
        lambda text: tokenizer.tokens(text, add_special_tokens=False),
        stores.bounds.run_aside,
        look_up=look_up,
        fingerprint=lambda: model_hash(context.fingerprint),
    )
    budget = PayloadBudget(stores.server.max_search_bytes)
    depth = max(stores.server.max_search_points // max(len(texts), 1), 1)
    searcher = Searcher(
        stores.schemas.store, model, schemas=stores.schemas, budget=budget, max_points=depth
    )
    await searcher.check(request.collection, schema)
    try:
        embedded = await searcher.embed(request.collection, texts, options, schema=schema)
    except Overloaded:
        has_table = (
            spec.sparse is not None
            and spec.sparse.can_look_up
            and Head.SPARSE in common_heads(schema, spec)
        )
        by_table = structs.replace(options, **BY_TABLE)
        if (
            not (stores.server.table_under_load and has_table)
            or options == by_table
            or request.spans
        ):
            raise
        options = by_table
        embedded = await searcher.embed(request.collection, texts, options, schema=schema)
    found = await asyncio.gather(
        *(
            searcher.find(
                request.collection, text, embedded, row, options, rank=rank, schema=schema
            )
            for row, text in enumerate(texts)
        )
    )
    spans = [] if request.spans is None else await _spans(context, request, found, request.spans)

    def written() -> list[dict[str, Any]]:
        results = [_result(context, one, usages[-1], options) for one in found]
        for result, of_hits in zip(results, spans, strict=False):
            _add_spans(result["hits"], of_hits, request.with_payload)
        return results

    results = await stores.bounds.run_aside(written) if options.highlights else written()
    marks = sum(len(hit.highlights or ()) for one in found for hit in one.hits) + sum(
        len(one) for of in spans for one in of
    )
    numbers = (
        NUMBERS_A_RANK * (sum(len(one.hits) for one in found) + marks)
        + budget.spent // BYTES_PER_NUMBER
    )
    return Reply(
        results[0] if request.query is not None else {"results": results}, usages[-1], numbers
    )


async def _spans(
    context: Context, request: SearchRequest, found: Sequence[SearchResult], options: RelevantSpans
) -> list[Spans]:
    """The best spans of each query's hits, from a second pass over their texts. Raises InvalidInput if no hit has a text."""
    texts = [[str(hit.payload.get(TEXT) or "") for hit in one.hits] for one in found]
    count = sum(map(len, texts))
    if count and not any(map(any, texts)):
        raise InvalidInput(
            f"`relevant_spans`: nothing that was found in `{request.collection}` has a `{TEXT}` in its payload"
        )
    most = MAX_SPANNED_CHARACTERS // max(count, 1)

    async def of_hits(query: str, texts: Sequence[str]) -> Spans:
        documents = [text[:most] for text in texts if text]
        if not documents:
            return [()] * len(texts)
        weights = RankWeights(0.0, 0.0, 1.0)
        task = rerank_task(
            context.service.model.spec, query, documents, weights=weights, spans=options
        )
        scored, _ = await context.rank(task, load_of_pairs(query, documents))
        spans = iter(scored.spans)
        return [next(spans) if text else () for text in texts]

    return await asyncio.gather(*map(of_hits, request.texts, texts))


def options_of(request: SearchRequest, server: ServerConfig) -> SearchOptions:
    """The request's options, checked before the store is called. Raises InvalidInput."""
    from hybridtei.retrieval.store.query import filter_from

    request.check_page()
    _check_candidates(request, server.max_search_points)
    options = SearchOptions.of(request, query_filter=filter_from(request.filter))
    if request.spans is None or options.with_payload is True:
        return options
    return structs.replace(options, with_payload=[*(options.with_payload or ()), TEXT])


def _check_candidates(request: SearchRequest, most: int) -> None:
    """Raises TooManyCandidates, naming the field, if a search would examine more than `most` points."""
    reach = {
        "`prefetch_limit`": request.prefetch_limit,
        "`offset` + `limit`": request.offset + request.limit,
        **({"`rerank_limit`": request.rerank_limit} if request.rerank is not False else {}),
    }
    name, value = max(reach.items(), key=lambda item: item[1])
    queries = len(request.texts)
    if queries * value > most:
        of_all = f" for each of {queries} `queries`" if queries > 1 else ""
        raise TooManyCandidates(
            f"{name} is {value}{of_all}; one search looks at {most} points at most (max-search-points)"
        )
    bounds = {
        "highlights": (request.highlights, MAX_HIGHLIGHTED),
        "relevant_spans": (request.spans is not None, MAX_SPANNED),
    }
    for field, (is_asked, hits) in bounds.items():
        if is_asked and queries * request.limit > hits:
            of_all = f" for each of {queries} `queries`" if queries > 1 else ""
            raise InvalidInput(
                f"`limit` is {request.limit}{of_all}; with `{field}`, {hits} hits are the most"
            )


def ranker(models: Models, name: bool | str) -> Rank | None:
    """The reranker of this name, or the first one. Raises InvalidInput if no reranker is loaded, UnknownModel."""
    if name is False:
        return None
    rerankers = [
        context for context in models.ready if context.service.model.spec.kind == "reranker"
    ]
    if isinstance(name, str):
        context = models.named(name)
    elif rerankers:
        context = rerankers[0]
    else:
        raise InvalidInput("`rerank`: no reranker is loaded; `rescore` ranks by multi-vectors")

    async def rank(query: str, documents: Sequence[str]) -> Floats:
        task = rerank_task(context.service.model.spec, query, documents, truncate=True)
        task.check(context.service.model.spec)
        scored, _ = await context.rank(task, load_of_pairs(query, documents))
        return scored.scores

    return rank


def _result(
    context: Context, results: SearchResult, usage: Usage, options: SearchOptions
) -> dict[str, Any]:
    stages = usage.timings
    spent_ms = (stages.tokenization_ns + stages.queue_ns + stages.inference_ns) / 1e6
    fields = results.as_dict()
    embed = {"name": "embed", "milliseconds": round(spent_ms, 3), "candidates": usage.load.inputs}
    by_table = {"query_encoder": "table"} if options.query_encoder == "table" else {}
    return {
        "model": context.served_name,
        **fields,
        "stages": [embed, *fields["stages"]],
        **by_table,
    }


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
