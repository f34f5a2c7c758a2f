"""What each stage of a search found and thought: asked of the store stage by stage, beside the one query that answers.

A database fuses and forgets what it fused. So every list is asked for once more by itself, timed, and points that a list did
not reach are scored by it exactly; the answer of the search itself stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from qdrant_client import models

from hybridtei.outputs import Embeddings
from hybridtei.search.query import NAMES, hybrid_query, score_requests
from hybridtei.store.base import MULTIVECTOR, PointId, Store
from hybridtei.store.pages import identity_of, in_order

if TYPE_CHECKING:
    from hybridtei.search.searcher import SearchOptions


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that was done, how long it took, and how many points came out of it."""

    name: str
    milliseconds: float
    candidates: int


@dataclass(frozen=True, slots=True)
class StageScore:
    """What a stage gave a point, and its place from 1; no rank: the stage did not find it, and was asked for its score."""

    score: float
    rank: int | None = None


Scores = dict[PointId, dict[str, StageScore]]


async def explain(
    store: Store,
    collection: str,
    request: models.QueryRequest,
    embedded: Embeddings,
    *,
    row: int,
    options: SearchOptions,
    ids: Sequence[PointId],
) -> tuple[list[Stage], Scores]:
    """(the stages, and for each of the points what each stage gave it). `request`: the one that answered."""
    assert options.mode is not None
    scores: Scores = {identity: {} for identity in ids}
    stages: list[Stage] = []
    candidates = max(options.prefetch_limit, (request.limit or 0) + (request.offset or 0))
    common: dict[str, Any] = {"query_filter": options.query_filter, "with_payload": False, "exact": options.exact}

    async def ask(name: str, asked: models.QueryRequest) -> None:
        began = perf_counter_ns()
        points = in_order(await store.query(collection, asked))
        stages.append(Stage(name, (perf_counter_ns() - began) / 1e6, len(points)))
        for place, point in enumerate(points, 1):
            known = scores.get(identity_of(point))
            if known is not None:
                known[name] = StageScore(point.score, place)

    legs = _legs(request)
    for leg in legs:
        if leg != MULTIVECTOR or len(legs) == 1:
            await ask(leg, hybrid_query(embedded, row, mode=leg, limit=candidates, **common))  # type: ignore[arg-type]
    if options.mode not in NAMES:
        fused = hybrid_query(
            embedded,
            row,
            mode=options.mode,
            limit=candidates,
            prefetch_limit=options.prefetch_limit,
            k=options.k,
            weights=options.weights,
            legs=options.legs,
            **common,
        )
        await ask(options.mode, fused)
    await _fill(store, collection, embedded, row=row, legs=[*legs, *([MULTIVECTOR] * options.rescore)], scores=scores)
    return stages, scores


def _legs(request: models.QueryRequest) -> list[str]:
    """The vectors that take part, in the request's own order."""
    found: list[str] = []

    def walk(node: Any) -> None:
        for prefetch in node.prefetch or []:
            walk(prefetch)
        if node.using is not None and node.using not in found:
            found.append(node.using)

    walk(request)
    return found


async def _fill(store: Store, collection: str, embedded: Embeddings, *, row: int, legs: Sequence[str], scores: Scores) -> None:
    for leg in dict.fromkeys(legs):
        missing = [identity for identity, known in scores.items() if leg not in known]
        if not missing:
            continue
        asked = score_requests(embedded, missing, row, legs=[leg])[leg]
        given = {identity_of(point): point.score for point in await store.query(collection, asked)}
        for identity in missing:
            scores[identity][leg] = StageScore(given.get(identity, 0.0))
