"""The steps of a search in a collection: embed, find, fuse, rescore, rerank, explain.

`Searcher` asks a store, a model that embeds, and one that ranks. It does not depend on server or
encoder: the command, the HTTP routes and the evaluation all use it. `offset` pages
through reranked points, so with a reranker each page ranks all of them again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

import msgspec
import numpy as np

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput
from hybridtei.inference.tasks.rerank import Scored, declared_weights
from hybridtei.models.text.tokenizer import Token
from hybridtei.options import EmbedOptions, RankOptions
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.documents import matching
from hybridtei.retrieval.ingest.text import normalised
from hybridtei.retrieval.search.absent import absent_key
from hybridtei.retrieval.search.calibration import Curve, curve_of, probabilities, way_of
from hybridtei.retrieval.search.candidates import Candidate, Candidates
from hybridtei.retrieval.search.explain import highlights, shared_terms
from hybridtei.retrieval.search.fusion import Legs, legs_of, weights_of
from hybridtei.retrieval.search.neighbours import KEYS, filter_beside, keys_of, passages
from hybridtei.retrieval.search.options import (
    CUT,
    Budget,
    CheckedOptions,
    Highlight,
    Mode,
    SearchHit,
    SearchOptions,
    SearchResult,
    Stage,
    StageScore,
)
from hybridtei.retrieval.store.base import (
    MULTIVECTOR,
    NAMES,
    SPARSE,
    CollectionSchema,
    PayloadBudget,
    Selector,
    Store,
    sort_points,
)
from hybridtei.retrieval.store.collection import CollectionSchemas, Searchable, VectorModel
from hybridtei.retrieval.store.own import Own, text_keys, text_of
from hybridtei.retrieval.store.plan import CALIBRATION
from hybridtei.retrieval.store.query import MAX_LIMIT

Aside = Callable[[Callable[[], Any]], Awaitable[Any]]
# Points retrieved with payloads and vectors in one call
FILLED_AT_ONCE = 100
# Hits in a group; a search can be cancelled between groups
HIGHLIGHTED_AT_ONCE = 8
SINGLE: tuple[Mode, ...] = ("dense", "sparse", "multivector")
NANOSECONDS_PER_MS = 1e6
# A key of a payload that is the same as the engine's path of it
NAME = re.compile(r"[\w-]+")
DEFAULTS = SearchOptions()
QUERIES = EmbedOptions(input_type="query")
NAMELESS = "one without a name, or that stops at `budget_ms`"


class Ranker(Protocol):
    """A model that ranks. `model_id`: its path or hub id, to which curves belong."""

    @property
    def model_id(self) -> str: ...

    async def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Scored: ...


class TextModel(VectorModel, Ranker, Protocol):
    """A model that embeds queries. `tokens_of`: for highlights."""

    def tokens_of(self, text: str) -> Iterable[Token]: ...


# Characters of queries that are normalised on the event loop
NORMALISED_AT_ONCE = 4096


def _normalised(queries: Sequence[str]) -> list[str]:
    return [normalised(query) or query for query in queries]


class Searcher:
    """Searches a store's collections by one model.

    `budget`: bytes of all payloads together.
    `max_points`: the depth to which a search may look for further groups. `aside`: runs work that
    would block the event loop.
    """

    def __init__(
        self,
        store: Store,
        model: TextModel,
        *,
        schemas: CollectionSchemas | None = None,
        budget: PayloadBudget | None = None,
        max_points: int = MAX_LIMIT,
        aside: Aside | None = None,
    ) -> None:
        if not hasattr(store, "query"):
            raise InvalidInput(
                f"`store` is {store!r}: should be `open_store(StoreConfig(qdrant_path=…))`, or of "
                "a `qdrant_url`"
            )
        self.store = store
        self.model = model
        self._budget, self._max_points = budget, max_points
        self._aside = aside or asyncio.to_thread
        self._schemas = schemas or CollectionSchemas(store)

    async def fit(
        self,
        collection: str,
        options: CheckedOptions = DEFAULTS,
        schema: CollectionSchema | None = None,
    ) -> Searchable:
        """The collection as this model searches it. `schema`: the collection's, if the caller has
        it. Raises UnknownCollection, CollectionMismatch, StoreError."""
        own = Own(options.unlabelled, options.dense_name, options.sparse_name, options.text_field)
        schema = schema or await self._schemas.of(collection)
        return await self._schemas.fit(collection, schema, self.model, own)

    async def embed(
        self,
        collection: str,
        queries: Sequence[str],
        options: CheckedOptions = DEFAULTS,
        *,
        fit: Searchable | None = None,
    ) -> Embeddings:
        """The queries' vectors of every kind that the collection has, one row a query, from one
        pass. `query_encoder` "table": only the kinds that the mode needs, sparse ones without a
        pass. Raises InvalidInput if there are none. `fit`: the collection, if the caller has it."""
        fit = fit or await self.fit(collection, options)
        heads = fit.heads
        # As documents are. A query that normalising would empty stays unchanged
        if sum(map(len, queries)) > NORMALISED_AT_ONCE:
            queries = await self._aside(partial(_normalised, queries))
        else:
            queries = _normalised(queries)
        if options.query_encoder == "model":
            return fit.fitted(
                await self.model.embed(
                    queries,
                    heads,
                    QUERIES,
                )
            )
        if Head.SPARSE not in heads:
            raise InvalidInput(
                f"`query_encoder` {options.query_encoder!r}: the collection or the model has no "
                "sparse vectors"
            )
        table = msgspec.structs.replace(QUERIES, query_encoder="table")
        sparse = (
            await self.model.embed(
                queries,
                frozenset({Head.SPARSE}),
                table,
            )
        ).sparse
        others = heads - {Head.SPARSE}
        if not others or (options.mode == "sparse" and not options.rescore):
            return Embeddings(sparse=sparse)
        rest = await self.model.embed(queries, others, QUERIES)
        return fit.fitted(replace(rest, sparse=sparse))

    async def search(
        self,
        collection: str,
        query: str,
        options: CheckedOptions | None = None,
        *,
        ranker: Ranker | None = None,
    ) -> SearchResult:
        """Embed a query and find points. `ranker`, if given, orders them at the end.

        Raises InvalidInput, naming the field; UnknownCollection, CollectionMismatch, StoreError,
        and the errors of embedding.
        """
        options = options or DEFAULTS
        ranking = CUT
        if ranker is None:
            options.check_unranked()
        else:
            ranking = options.ranking

        # `reading` calls this again if a migration switches the collection meanwhile
        async def search_once(schema: CollectionSchema) -> SearchResult:
            fit = await self.fit(collection, options, schema)
            began = perf_counter_ns()
            embedded = await self.embed(collection, [query], options, fit=fit)
            embedding = Stage("embed", since(began), 1)
            result = await self.find(
                collection,
                query,
                embedded,
                row=0,
                options=options,
                ranker=ranker,
                ranking=ranking,
                fit=fit,
            )
            return msgspec.structs.replace(result, stages=[embedding, *result.stages])

        return await self._schemas.reading(collection, search_once)

    async def find(
        self,
        collection: str,
        query: str,
        embedded: Embeddings,
        row: int,
        options: CheckedOptions | None = None,
        *,
        ranker: Ranker | None = None,
        ranking: RankOptions = CUT,
        fit: Searchable | None = None,
    ) -> SearchResult:
        """Find points for a query that is already embedded: row `row` of `embedded`. Hits that a
        ranker orders until a deadline have no probabilities.

        Equal scores are in the order of ids, as far as `store.base.best_points` can ensure it.
        Raises the errors of `search`.
        """
        options = options or DEFAULTS
        fit = fit or await self.fit(collection, options)
        options = self._settled(options, fit)
        assert options.mode is not None
        if ranker is not None:
            options.check_reranked()
        began = perf_counter_ns()
        legs = legs_of(embedded, row, options, is_packed=fit.packed is not None)
        way: str | None = None
        curve: Curve | None = None
        # A search of other collections makes no name and reads no curve
        if (
            CALIBRATION in fit.schema.metadata
            or options.explain
            or options.min_probability is not None
        ):
            way, curve = _calibrated(
                fit,
                options,
                legs,
                _name(ranker, ranking),
            )
        payload, vectors = _selectors(
            options,
            embedded,
            fit,
            ranked=ranker is not None,
        )
        candidates = Candidates(
            self.store,
            fit.name,
            legs,
            options,
            fit.packed,
            self._max_points,
            self._budget,
            payload=False if vectors else payload,
            names=fit.names,
        )
        last = options.offset + options.limit
        depth, skipped = last, options.offset
        if ranker is not None:
            # The reranker may move any of these points to the page
            depth, skipped = max(options.rerank_limit, last), 0
        is_bounded = options.min_probability is not None or options.rerank_threshold is not None
        best = await candidates.best(depth)
        if candidates.has_tiers:
            best[skipped:] = sort_points(best[skipped:])
        _note(best, MULTIVECTOR if options.rescore else options.mode, 0)
        if ranker is None and (is_bounded or curve is not None):
            best = _rated(best, curve, options)
        page = await self._filled(fit.name, best[skipped:], payload, vectors)
        stages = list(candidates.stages) if options.explain else []
        stages.append(Stage("search", since(began), len(page)))
        budget: Budget | None = None
        if ranker is not None:
            began = perf_counter_ns()
            best, unranked, budget = await _reranked(
                page,
                partial(ranker.rank, query, options=ranking),
                options.text_field,
            )
            if ranking.deadline_ns is None:
                budget = None
            stages.append(Stage("rerank", since(began), len(page)))
            if is_bounded or curve is not None:
                best = _rated(best, curve, options)
            if not is_bounded:
                best += unranked
            page = best[options.offset : last]
            _note(page, "rerank", options.offset)
        answerable: bool | None = None
        if is_bounded:
            answerable = bool(best)
        hits, note = await self._hits(page, embedded, row, options), None
        if options.neighbours is not None:
            hits = await self._with_passages(fit.name, page, hits, options)
        if not hits and options.query_filter is not None:
            note = await absent_key(self.store, fit.name, options.query_filter)
        return SearchResult(
            options.mode,
            hits,
            stages,
            budget=budget,
            answerable=answerable,
            way=way,
            note=note,
        )

    async def _filled(
        self,
        collection: str,
        page: Sequence[Candidate],
        with_payload: Selector,
        with_vectors: Selector,
    ) -> list[Candidate]:
        """Add payloads and vectors to the page; drop points that were deleted meanwhile. Raises
        PayloadsTooLarge."""
        if not (with_payload or with_vectors):
            return list(page)
        unread = {candidate.id: candidate for candidate in page if not candidate.is_read}
        if self._budget is not None:
            self._budget.spend([candidate for candidate in page if candidate.is_read])
        ids = list(unread)
        for begin in range(0, len(ids), FILLED_AT_ONCE):
            records = await self.store.retrieve(
                collection,
                ids[begin : begin + FILLED_AT_ONCE],
                with_payload=with_payload,
                with_vectors=with_vectors,
            )
            if self._budget is not None:
                self._budget.spend(records)
            for record in records:
                unread[record.id].take(record)
        return [candidate for candidate in page if candidate.is_read]

    def _settled(self, options: CheckedOptions, fit: Searchable) -> CheckedOptions:
        """The options with mode, weights and groups. The defaults come from the collection and the
        checkpoint."""
        mode, weights = options.mode, options.weights
        if mode is None:
            names = [name for name in SINGLE if name in fit.heads]
            mode = "zscore" if options.rrf_k is None else "rrf"
            if len(names) == 1:
                mode = names[0]
        if mode == "weighted" and weights is None and options.legs is None:
            declared = declared_weights(self.model.spec)
            if declared is not None:
                weights = {
                    name: weight for name, weight in declared.by_name.items() if name in fit.heads
                }
        group_by = options.group_by
        # A record that happens to have the key is no part of a document
        if group_by == "document" and not fit.has_documents:
            group_by = None
        return options.settled(mode, weights, group_by)

    async def _hits(
        self, page: Sequence[Candidate], embedded: Embeddings, row: int, options: CheckedOptions
    ) -> list[SearchHit]:
        def hits_of(candidates: Sequence[Candidate]) -> list[SearchHit]:
            return [self._hit(candidate, embedded, row, options) for candidate in candidates]

        if not options.highlights:
            return hits_of(page)
        hits: list[SearchHit] = []
        for begin in range(0, len(page), HIGHLIGHTED_AT_ONCE):
            hits += await self._aside(partial(hits_of, page[begin : begin + HIGHLIGHTED_AT_ONCE]))
        return hits

    async def _with_passages(
        self,
        collection: str,
        page: Sequence[Candidate],
        hits: list[SearchHit],
        options: CheckedOptions,
    ) -> list[SearchHit]:
        """The hits, and what they have of `neighbours`. Raises PayloadsTooLarge."""
        neighbours = options.neighbours
        if neighbours is None:
            return hits
        keys = keys_of(candidate.payload for candidate in page)
        if not keys:
            return hits
        points = await matching(
            self.store,
            collection,
            filter_beside(keys.values(), neighbours),
            [*KEYS, *text_keys(options.text_field)],
        )
        if self._budget is not None:
            self._budget.spend(points)
        texts = await self._aside(
            partial(passages, keys, points, neighbours, options.text_field, self.model.tokens_of)
        )
        change = msgspec.structs.replace
        return [change(hit, passage=texts.get(place)) for place, hit in enumerate(hits)]

    def _hit(
        self, candidate: Candidate, embedded: Embeddings, row: int, options: CheckedOptions
    ) -> SearchHit:
        payload = candidate.payload
        marks: list[Highlight] | None = None
        if options.highlights:
            marks = []
            # No other kind was read
            (sparse,) = candidate.vectors.values() or [None]
            if embedded.sparse and sparse:
                document = sparse["indices"], sparse["values"]
                terms = shared_terms(embedded.sparse.row(row), document)
                text = text_of(payload, options.text_field)
                marks = highlights(text, terms, self.model.tokens_of)
        if not isinstance(options.with_payload, bool):
            payload = {name: payload[name] for name in options.with_payload if name in payload}
        elif not options.with_payload:
            payload = {}
        legs = candidate.legs if options.explain else None
        return SearchHit(
            candidate.id,
            candidate.score,
            payload,
            marks,
            legs,
            candidate.more,
            candidate.probability,
        )


def since(began_ns: int) -> float:
    """The milliseconds since `began_ns`."""
    return round((perf_counter_ns() - began_ns) / NANOSECONDS_PER_MS, 3)


def _note(candidates: Sequence[Candidate], stage: str, before: int) -> None:
    """Record the deciding score as this stage's."""
    for place, candidate in enumerate(candidates, before + 1):
        candidate.legs[stage] = StageScore(candidate.score, place)


def _name(ranker: Ranker | None, ranking: RankOptions) -> str | None:
    """The name of a ranker whose scores mean the same in every search."""
    if ranker is None:
        return None
    return (ranking.deadline_ns is None and ranker.model_id) or NAMELESS


def _calibrated(
    fit: Searchable, options: CheckedOptions, legs: Legs, ranker: str | None
) -> tuple[str | None, Curve | None]:
    """The way of a search and its curve; neither for a query that lacks a vector of the way. Raises
    InvalidInput if `min_probability` needs a curve that the collection does not have."""
    weights = weights_of([name for name in NAMES if name in fit.heads], options)
    way = way_of(options, weights, ranker)
    curve = curve_of(fit.schema, way)
    if curve is None and options.min_probability is not None:
        names = "; ".join(fit.schema.metadata.get(CALIBRATION, ())) or "none"
        raise InvalidInput(
            f"`min_probability` needs a curve of this way of searching ({way}); {fit.name!r} has: "
            f"{names}; `hybridtei eval FOLDER --calibrate` fits one"
        )
    # Scores of a query without words, say, are made of fewer vectors
    if legs.weights != weights:
        return None, None
    return way, curve


def _rated(
    candidates: list[Candidate], curve: Curve | None, options: CheckedOptions
) -> list[Candidate]:
    """Give candidates their probabilities by the curve, and drop those below a bound. No
    probability counts as 0."""
    if curve is not None:
        values = probabilities(curve, [candidate.score for candidate in candidates])
        for candidate, value in zip(candidates, values, strict=True):
            candidate.probability = value
    floor, threshold = options.min_probability or 0.0, options.rerank_threshold
    return [
        candidate
        for candidate in candidates
        if (candidate.probability or 0.0) >= floor
        and (threshold is None or candidate.score >= threshold)
    ]


def _selectors(
    options: CheckedOptions, embedded: Embeddings, fit: Searchable, *, ranked: bool
) -> tuple[Selector, Selector]:
    """The selectors (payload, vectors) of everything that the answer, a reranker or highlights
    need."""
    payload: Selector
    if options.with_payload is True:
        payload = fit.payload
    else:
        keys = list(options.with_payload or ())
        if ranked or options.highlights:
            keys += text_keys(options.text_field)
        if options.neighbours is not None:
            keys += KEYS
        payload = keys or False
        # The engine reads any other name as a path
        if not all(NAME.fullmatch(key) for key in keys):
            payload = fit.payload
    vectors: Selector = False
    if options.highlights and embedded.sparse is not None:
        vectors = [fit.names.get(SPARSE, SPARSE)]
    return payload, vectors


async def _reranked(
    page: list[Candidate], rank: Callable[[Sequence[str]], Awaitable[Scored]], text_field: str
) -> tuple[list[Candidate], list[Candidate], Budget | None]:
    """(hits ranked by `rank`, hits without a text in their earlier order, how many were scored).
    Equal scores keep the search's order."""
    texts = [text_of(hit.payload, text_field) for hit in page]
    with_text = [hit for hit, text in zip(page, texts, strict=True) if text]
    without_text = [hit for hit, text in zip(page, texts, strict=True) if not text]
    if not with_text:
        return [], page, None
    scored = await rank([text for text in texts if text])
    for hit, score in zip(with_text, scored.scores, strict=True):
        hit.score = float(score)
    best_first = np.argsort(-np.asarray(scored.scores, np.float64), kind="stable")
    budget = Budget.spent(len(with_text), scored.unscored)
    return [with_text[place] for place in best_first], without_text, budget
