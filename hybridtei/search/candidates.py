"""Candidates of a query, in tiers: found by some of its vectors, scored by all, one a group where that is asked for.

`zscore` adds up scores that are normalised for each query: dense and sparse score all candidates exactly, and the scores of
each get mean 0 and deviation 1 over them. So a leg that finds nothing, or the same everywhere, changes no place, and cosines
and sums of term weights need no common scale. MaxSim joins the sum for the better half; the others count as its worst.

Mean and deviation are those of the first tier, which has `prefetch_limit` points of each leg. Where a page needs more, further
tiers follow, each twice as deep, and stand below the tiers before them. What a tier holds depends on the query alone and not on
the page, so a point stands on one page only. A tier of groups leaves out the groups that were found before: a document with
thousands of chunks hides no other.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.ingest.chunking import DOCUMENT_ID
from hybridtei.outputs import Embeddings
from hybridtei.search.options import SearchOptions, Stage, StageScore
from hybridtei.search.query import finders_of, hybrid_query, legs_of, score_request, search_params, vectors_of
from hybridtei.store import MAX_LIMIT
from hybridtei.store.base import MULTIVECTOR, SPARSE, PayloadBudget, PointId, Store, id_of, page_of

DIGITS = 5  # of a sum: further ones are rounding, which differs from engine to engine
MAXSIM_SHARE = 2  # one in so many candidates is scored by MaxSim, the best by the other legs: more changed no figure
FLAT = 1e-6  # a deviation below it is rounding: the leg scores all candidates alike
GROUPS = {"document": DOCUMENT_ID}  # words for keys of the payload

Group = int | str
Floats64 = NDArray[np.float64]


@dataclass(slots=True)
class Candidate:
    """A point and its score. `legs`: what each leg scored, in mode zscore. `group`: the field's value, None where the point has
    none; `more`: how many further points of the group its tier holds."""

    id: PointId
    score: float
    legs: dict[str, StageScore] = field(default_factory=dict)
    group: Group | None = None
    more: int = 0


@dataclass(slots=True)
class _Tier:
    """Candidates, the best first. `is_last`: the store has no others."""

    candidates: list[Candidate]
    is_last: bool


class Candidates:
    """The candidates of one query, as far as pages need them.

    `options` with a mode, as `Searcher` settles it. `max_points`: how deep all tiers together may look when points are grouped.
    `budget`: of the values that they are grouped by.
    Raises InvalidInput, naming the field, for options that mean nothing together.
    """

    def __init__(
        self,
        store: Store,
        collection: str,
        embedded: Embeddings,
        row: int,
        options: SearchOptions,
        *,
        max_points: int = MAX_LIMIT,
        budget: PayloadBudget | None = None,
    ) -> None:
        options.check_page()
        self._store, self._collection = store, collection
        self._embedded, self._row, self._options = embedded, row, options
        self._max_points, self._budget = max_points, budget
        self._key = None if options.group_by is None else _key_of(options.group_by)
        self._vectors: dict[str, Any] = {}
        self._weights: dict[str, float] = {}  # leg -> weight, in mode zscore
        if options.mode == "zscore":
            if options.k is not None:
                raise InvalidInput("`k` means nothing in mode 'zscore'")
            self._vectors = vectors_of(embedded, row)
            legs, weights = legs_of(self._vectors, "zscore", options.legs, options.weights)
            assert weights is not None
            self._weights = dict(zip(legs, weights, strict=True))
            if options.rescore and MULTIVECTOR not in self._vectors:
                raise InvalidInput("`rescore`: the query has no multivector vector")
        self._scale: dict[str, tuple[float, float]] = {}  # leg -> (mean, deviation) in the first tier
        self._stages: dict[str, Stage] = {}

    @property
    def stages(self) -> list[Stage]:
        """What each leg took, in mode zscore, and how many points it gave."""
        return list(self._stages.values())

    async def best(self, count: int) -> list[Candidate]:
        """The first `count` candidates, or all there are. Raises what `Store.query` raises."""
        found: dict[PointId, Candidate] = {}
        depth, spent = self._options.prefetch_limit, 0
        while len(found) < count:
            tier = await self._tier(depth, found)
            fresh = [candidate for candidate in tier.candidates if candidate.id not in found]
            for candidate in fresh if self._key is None else _one_a_group(fresh):
                found[candidate.id] = candidate
            is_last = tier.is_last or (not fresh and depth == MAX_LIMIT)  # legs may agree on all points of a tier: go deeper
            spent += depth
            depth = min(2 * depth, MAX_LIMIT)
            if is_last or (self._key is not None and spent + depth > self._max_points):
                break
        return list(found.values())[:count]

    async def _tier(self, depth: int, found: Mapping[PointId, Candidate]) -> _Tier:
        query_filter, threshold = self._options.query_filter, self._options.score_threshold
        if self._key is not None and found:
            query_filter = _without(self._key, list(found.values()), query_filter)
        if not self._weights:
            return await self._queried(depth, query_filter)
        tier = await self._zscored(depth, query_filter, found)
        if threshold is None:
            return tier
        kept = [candidate for candidate in tier.candidates if candidate.score >= threshold]
        return _Tier(kept, tier.is_last or len(kept) < len(tier.candidates))

    async def _queried(self, depth: int, query_filter: models.Filter | None) -> _Tier:
        """The store's own ranking."""
        payload = self._payload
        request = hybrid_query(
            self._embedded,
            self._row,
            self._options,
            limit=depth,
            offset=0,
            prefetch_limit=depth,
            query_filter=query_filter,
            with_payload=payload,
            group_by=None,
        )
        points = await page_of(self._store, self._collection, request, budget=self._budget)
        found = [Candidate(id_of(point), point.score, group=self._group(point)) for point in points]
        return _Tier(found, len(points) < depth)

    @property
    def _payload(self) -> bool | list[str]:
        return False if self._key is None else [self._key]

    def _group(self, point: models.ScoredPoint) -> Group | None:
        return None if self._key is None else group_of(point.payload or {}, self._key)

    async def _zscored(self, depth: int, query_filter: models.Filter | None, before: Mapping[PointId, Candidate]) -> _Tier:
        lists = await self._found(depth, query_filter)
        groups = {id_of(point): self._group(point) for points in lists.values() for point in points}
        ids = [identity for identity in groups if identity not in before]
        scores = await self._scored(ids, lists, depth)
        total = np.zeros(len(ids))
        for leg, known in scores.items():
            total += self._part(leg, known, ids)
        if self._takes_maxsim and MULTIVECTOR not in lists and ids:
            best = np.argsort(-total, kind="stable")[: len(ids) if self._options.rescore else max(depth // MAXSIM_SHARE, 1)]
            scores[MULTIVECTOR] = await self._exact(MULTIVECTOR, [ids[i] for i in best])
            if self._options.rescore:
                total = _column(scores[MULTIVECTOR], ids)
            else:
                total += self._part(MULTIVECTOR, scores[MULTIVECTOR], ids)
        found = [Candidate(one, score, group=groups[one]) for one, score in zip(ids, total.round(DIGITS).tolist(), strict=True)]
        if self._options.explain:
            places = {leg: {id_of(point): place for place, point in enumerate(points, 1)} for leg, points in lists.items()}
            for one in found:
                one.legs = {
                    leg: StageScore(known[one.id], places.get(leg, {}).get(one.id))
                    for leg, known in scores.items()
                    if one.id in known
                }
        found.sort(key=lambda one: (-one.score, isinstance(one.id, str), one.id))
        return _Tier(found, all(len(points) < depth for points in lists.values()))

    @property
    def _takes_maxsim(self) -> bool:
        return MULTIVECTOR in self._weights or bool(self._options.rescore)

    def _part(self, leg: str, known: Mapping[PointId, float], ids: Sequence[PointId]) -> Floats64:
        """A leg's normalised and weighed scores of the candidates: float64[candidates]."""
        column = _column(known, ids)
        if len(ids):
            self._scale.setdefault(leg, (float(column.mean()), float(column.std())))
        mean, deviation = self._scale.get(leg, (0.0, 0.0))
        return (column - mean) * (self._weights.get(leg, 0.0) / deviation if deviation > FLAT else 0.0)

    async def _found(self, depth: int, query_filter: models.Filter | None) -> dict[str, list[models.ScoredPoint]]:
        """The best points of each leg that finds any."""
        params = search_params(self._options.exact, self._options.oversampling)

        def request(leg: str) -> models.QueryRequest:
            return models.QueryRequest(
                query=self._vectors[leg],
                using=leg,
                limit=depth,
                filter=query_filter,
                params=params,
                with_payload=self._payload,
            )

        legs = finders_of(list(self._weights))
        pages = (self._timed(leg, page_of(self._store, self._collection, request(leg), budget=self._budget)) for leg in legs)
        return dict(zip(legs, await asyncio.gather(*pages), strict=True))

    async def _scored(
        self, ids: Sequence[PointId], lists: Mapping[str, Sequence[models.ScoredPoint]], depth: int
    ) -> dict[str, dict[PointId, float]]:
        """Exact scores of every candidate by the legs that found them."""
        scores = {leg: {id_of(point): point.score for point in points} for leg, points in lists.items()}
        missing = {leg: [identity for identity in ids if identity not in known] for leg, known in scores.items()}
        if SPARSE in lists and len(lists[SPARSE]) < depth:
            missing[SPARSE] = []  # all points that share a term are there
        asked = [leg for leg, some in missing.items() if some]
        for leg, known in zip(asked, await asyncio.gather(*(self._exact(leg, missing[leg]) for leg in asked)), strict=True):
            scores[leg] |= known
        if SPARSE in scores:
            scores[SPARSE] = dict.fromkeys(ids, 0.0) | scores[SPARSE]
        return scores

    async def _exact(self, leg: str, ids: Sequence[PointId]) -> dict[PointId, float]:
        request = score_request(self._vectors[leg], leg, ids)
        points = await self._timed(leg, self._store.query(self._collection, request))
        return {id_of(point): point.score for point in points}

    async def _timed(self, leg: str, query: Awaitable[list[models.ScoredPoint]]) -> list[models.ScoredPoint]:
        began = perf_counter_ns()
        points = await query
        before = self._stages.get(leg, Stage(leg, 0.0, 0))
        spent_ms = before.milliseconds + (perf_counter_ns() - began) / 1e6
        self._stages[leg] = Stage(leg, spent_ms, before.candidates + len(points))
        return points


def _column(known: Mapping[PointId, float], ids: Sequence[PointId]) -> Floats64:
    """Scores in the order of `ids`; a candidate that has none counts as the worst that has one."""
    least = min((known[identity] for identity in ids if identity in known), default=0.0)
    return np.array([known.get(identity, least) for identity in ids], np.float64)


def _one_a_group(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best of each group, with the number of the others; a candidate without a group is one by itself."""
    best: dict[Any, Candidate] = {}
    for candidate in candidates:
        key = (candidate.group,) if candidate.group is not None else (None, candidate.id)
        first = best.setdefault(key, candidate)
        first.more += first is not candidate
    return list(best.values())


def _key_of(group_by: str) -> str:
    """The key of the payload. Raises InvalidInput for one that filters of Qdrant read as something else."""
    if re.fullmatch(r"[\w-]+(\.[\w-]+)*", group_by) is None:
        raise InvalidInput(f"`group_by` is {group_by!r}, should be names of letters, digits, _ and -, with dots between them")
    return GROUPS.get(group_by, group_by)


def group_of(payload: Mapping[str, Any], key: str) -> Group | None:
    """The text or whole number under a key, whose parts stand between dots, or alone in a list; None for anything else."""
    value: Any = payload
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) or type(value) is int else None


def _without(key: str, found: Sequence[Candidate], query_filter: models.Filter | None) -> models.Filter:
    """The filter, and none of the groups, or points without a group, that were found."""
    texts = [one.group for one in found if isinstance(one.group, str)]
    numbers = [one.group for one in found if isinstance(one.group, int)]
    # A match looks into lists of several values too, whose points are of no group.
    is_one = models.FieldCondition(key=key, values_count=models.ValuesCount(lt=2))
    refused: list[Any] = [
        models.Filter(must=[models.FieldCondition(key=key, match=models.MatchAny(any=values)), is_one])
        for values in (texts, numbers)
        if values
    ]
    alone = [one.id for one in found if one.group is None]
    if alone:
        refused.append(models.HasIdCondition(has_id=list(alone)))
    return models.Filter(must=None if query_filter is None else [query_filter], must_not=refused)
