"""Searches and new points over the server's vector store: which model embeds, and its place in the engine's queue.

A query is embedded as any short request is, in the express lane; what is to be stored goes through in parts, so that a large
upsert holds no more permits than an ordinary request. qdrant-client is an extra: nothing here imports it before it is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridtei.batch import Head
from hybridtei.engine.service import Answered
from hybridtei.errors import InvalidInput
from hybridtei.outputs import Embeddings, Floats
from hybridtei.server import jobs
from hybridtei.server.answers.rerank import NUMBERS_A_RANK, rank_texts
from hybridtei.server.context import Context, Reply
from hybridtei.server.models import Models
from hybridtei.server.observe import Load, Usage
from hybridtei.server.tracing import handler
from hybridtei.server.wire.search import SearchRequest
from hybridtei.tasks.embed import Embed

if TYPE_CHECKING:
    from hybridtei.qdrant.search import Found, Rank, SearchOptions
    from hybridtei.qdrant.search_layouts import Layouts
    from hybridtei.qdrant.store import CollectionPlan


@dataclass(frozen=True, slots=True)
class Shelf:
    """What a request for the store is answered with. `named`: the model of the path or the body, if one is named there."""

    models: Models
    layouts: Layouts
    named: str | None = None

    def embedder(self, plan: CollectionPlan | None) -> Context:
        """The model that is named, or whose vectors the collection holds, or the first that embeds. Raises UnknownModel."""
        from hybridtei.qdrant.collection import MODEL_ID

        if self.named is None and plan is not None:
            wanted = plan.metadata.get(MODEL_ID)
            for context in self.models.ready:
                if context.model.model_id == wanted:
                    return context
        return self.models.choose(None, self.named, jobs.EMBED_HYBRID)


@handler("search")
async def search(shelf: Shelf, request: SearchRequest) -> Reply:
    """`/search`: embed, find, fuse, rescore, rerank."""
    from hybridtei.qdrant.search import QueryModel, Searcher

    texts, options = request.texts, options_of(request)
    rank = ranker(shelf.models, request.rerank)
    context = shelf.embedder(await shelf.layouts.of(request.collection))
    usages: list[Usage] = []

    async def embed(queries: Sequence[str], heads: frozenset[Head]) -> Embeddings:
        task = Embed(list(queries), heads, input_type="query")
        load = Load(len(queries), sum(map(len, queries)), is_batch=request.query is None)
        answer, usage = await context.measured(lambda: context.run(task, load), load)
        usages.append(usage)
        return answer

    tokenizer, spec = context.service.model.reader.tokenizer, context.service.model.spec
    model = QueryModel(
        context.model.model_id,
        spec,
        embed,
        lambda text: tokenizer.tokens([text.lower() if spec.lowercase else text], add_special_tokens=False)[0],
    )
    searcher = Searcher(shelf.layouts.store, model, layouts=shelf.layouts)
    embedded = await searcher.embed(request.collection, texts)
    finding = (searcher.find(request.collection, text, embedded, row, options, rank=rank) for row, text in enumerate(texts))
    found = await asyncio.gather(*finding)
    results = [_result(context, one, usages[0]) for one in found]
    numbers = NUMBERS_A_RANK * sum(len(one.hits) for one in found)
    return Reply(results[0] if request.query is not None else {"results": results}, usages[0], numbers)


def options_of(request: SearchRequest) -> SearchOptions:
    """The request's wishes. Raises InvalidInput, before a store is asked."""
    from hybridtei.qdrant.query import check_page
    from hybridtei.qdrant.search import SearchOptions
    from hybridtei.qdrant.search_filters import filter_from

    check_page(request.mode or "rrf", request.limit, request.prefetch_limit, request.offset)
    fields = request.with_payload if isinstance(request.with_payload, list) else None
    return SearchOptions(
        mode=request.mode,
        limit=request.limit,
        offset=request.offset,
        prefetch_limit=request.prefetch_limit,
        k=request.k,
        weights=request.weights,
        legs=request.legs,
        rescore=request.rescore,
        rerank_limit=request.rerank_limit,
        query_filter=filter_from(request.filter),
        score_threshold=request.score_threshold,
        exact=request.exact,
        with_payload=fields is not None or request.with_payload is True,
        fields=fields,
        highlights=request.highlights,
        explain=request.explain,
    )


def ranker(models: Models, wanted: bool | str) -> Rank | None:
    """The reranker that is wanted: True for the first that is loaded. Raises InvalidInput where there is none, UnknownModel."""
    if wanted is False:
        return None
    rerankers = [context for context in models.ready if context.service.model.spec.kind == "reranker"]
    if isinstance(wanted, str):
        context = models.named(wanted)
    elif rerankers:
        context = rerankers[0]
    else:
        raise InvalidInput("`rerank`: no reranker is loaded; `rescore` ranks by multi-vectors")

    async def rank(query: str, documents: Sequence[str]) -> Floats:
        return await rank_texts(context, query, documents)

    return rank


def _result(context: Context, found: Found, usage: Usage) -> dict[str, Any]:
    from hybridtei.qdrant.found_text import plain

    stages = usage.timings
    spent_ms = (stages.tokenization_ns + stages.queue_ns + stages.inference_ns) / 1e6
    told = plain(found)
    told["stages"] = [{"name": "embed", "milliseconds": round(spent_ms, 3), "candidates": usage.load.inputs}, *told["stages"]]
    return {"model": context.served_name, **told}


async def embed_documents(
    context: Context, texts: Sequence[str], heads: frozenset[Head], *, truncate: bool | None
) -> tuple[Embeddings, Usage]:
    """Every wanted output of texts to be stored, in parts. Raises what the first part that fails raises."""
    from hybridtei.server.parts import plan, run_in_parts

    task = Embed(list(texts), heads, context.truncate(truncate), input_type="document")
    load = Load(len(texts), sum(map(len, texts)), is_batch=True)
    parts = plan(
        len(texts), largest=context.server.max_client_batch_size, permits=context.service.config.max_concurrent_requests
    )

    async def work() -> Answered[Embeddings]:
        return await run_in_parts(context.service, task, parts)

    return await context.measured(work, load, checked=False)
