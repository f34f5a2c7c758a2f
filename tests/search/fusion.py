"""Several ranked lists become one, on this side: exactly, always in the same order, and with every list's part in it kept.

Numpy only; knows no store. For what a database cannot compute (z-scores, min-max), and to explain what it did compute. The
surprise: ties are common in rank fusion and databases order them anyhow; here (score, best rank in any list, id) decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import InvalidInput
from hybridtei.store.base import PointId

Scores = NDArray[np.float64]

DEFAULT_K = 2


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """One list, best first: ids, and their scores float64[n]."""

    ids: Sequence[PointId]
    scores: Scores

    @classmethod
    def of(cls, points: Sequence[Any]) -> Ranking:
        """Of a store's answer: anything with `id` and `score`."""
        return cls([point.id for point in points], np.array([point.score for point in points], dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """The union of several lists, best first, with what each of them said.

    scores  float64[n]
    parts   float64[n, lists]  what each list added; 0 where it lacks the point
    given   float64[n, lists]  the list's own score; NaN where it lacks the point
    ranks   int64[n, lists]    from 1; 0 where it lacks the point
    """

    ids: list[PointId]
    scores: Scores
    parts: Scores
    given: Scores
    ranks: NDArray[np.int64]


def rrf(rankings: Sequence[Ranking], *, k: int = DEFAULT_K, weights: Sequence[float] | None = None) -> Fused:
    """Reciprocal rank fusion as Qdrant computes it: the sum of 1 / (rank / weight + k - 1); k=61 is Cormack's 60.

    A weight of 0 or less adds nothing. Raises InvalidInput if weights and lists differ in number.
    """
    weighing = _weights(weights, rankings)

    def part(scores: Scores, weight: float) -> Scores:
        if weight <= 0:
            return np.zeros(len(scores))
        with np.errstate(over="ignore"):  # a rank divided by next to nothing is infinite, and its part 0
            return np.asarray(1.0 / (np.arange(1, len(scores) + 1) / weight + k - 1))

    return _fuse(rankings, [part(ranking.scores, weight) for ranking, weight in zip(rankings, weighing, strict=True)])


def weighted_sum(rankings: Sequence[Ranking], weights: Sequence[float] | None = None) -> Fused:
    """The sum of weight × score; a list that lacks a point adds 0, so let every list hold every candidate."""
    return _weighted(rankings, weights, lambda scores: scores)


def min_max(rankings: Sequence[Ranking], weights: Sequence[float] | None = None) -> Fused:
    """Each list is stretched to 0…1 first, as Weaviate's relative score; a list of equal scores becomes 1."""

    def stretched(scores: Scores) -> Scores:
        spread = np.ptp(scores)
        return np.asarray((scores - scores.min()) / spread) if spread > 0 else np.ones(len(scores))

    return _weighted(rankings, weights, stretched)


def z_scores(rankings: Sequence[Ranking], weights: Sequence[float] | None = None) -> Fused:
    """Each list is centred and divided by its sample deviation first; a list without spread becomes 0.

    A list that lacks a point adds what its lowest score has, since the point ranks below it, not 0, which would be the middle.
    """
    weighing = _weights(weights, rankings)
    parts, missing = [], []
    for ranking, weight in zip(rankings, weighing, strict=True):
        deviation = _deviation(ranking.scores)
        centred = (ranking.scores - ranking.scores.mean()) / deviation if deviation > 0 else np.zeros(len(ranking.scores))
        parts.append(weight * centred)
        missing.append(weight * centred.min() if len(centred) else 0.0)
    return _fuse(rankings, parts, missing)


def _deviation(scores: Scores) -> float:
    """Of the sample; exactly 0 for equal scores, whose computed one need not be."""
    return float(scores.std(ddof=1)) if len(scores) > 1 and np.ptp(scores) > 0 else 0.0


def _weighted(rankings: Sequence[Ranking], weights: Sequence[float] | None, scale: Callable[[Scores], Scores]) -> Fused:
    weighing = _weights(weights, rankings)
    parts = [
        weight * scale(ranking.scores) if len(ranking.scores) else ranking.scores
        for ranking, weight in zip(rankings, weighing, strict=True)
    ]
    return _fuse(rankings, parts)


def _weights(weights: Sequence[float] | None, rankings: Sequence[Ranking]) -> Sequence[float]:
    if weights is None:
        return [1.0] * len(rankings)
    if len(weights) != len(rankings):
        raise InvalidInput(f"`weights` are {len(weights)}, should be as many as there are lists, {len(rankings)}")
    return weights


def _fuse(rankings: Sequence[Ranking], parts: Sequence[Scores], missing: Sequence[float] | None = None) -> Fused:
    row_of: dict[PointId, int] = {}
    for ranking in rankings:
        for given in ranking.ids:
            row_of.setdefault(given, len(row_of))
    shape = (len(row_of), len(rankings))
    table = np.tile(np.asarray(missing, dtype=np.float64), (shape[0], 1)) if missing is not None else np.zeros(shape)
    given_scores, ranks = np.full(shape, np.nan), np.zeros(shape, dtype=np.int64)
    for column, (ranking, part) in enumerate(zip(rankings, parts, strict=True)):
        rows = np.array([row_of[given] for given in ranking.ids], dtype=np.intp)
        table[rows, column] = part
        given_scores[rows, column] = ranking.scores
        ranks[rows, column] = np.arange(1, len(rows) + 1)
    ids, totals = list(row_of), table.sum(axis=1)
    best = np.where(ranks > 0, ranks, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
    # sums of the same terms in another order differ in their last bits, and are ties all the same
    tied = [float(f"{total:.12g}") for total in totals]
    order = sorted(range(len(ids)), key=lambda row: (-tied[row], best[row], isinstance(ids[row], str), ids[row]))
    return Fused([ids[row] for row in order], totals[order], table[order], given_scores[order], ranks[order])
