"""The formulas by which lists are fused, in numpy: what tests hold the stores' answers against."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtei.retrieval.store.base import PointId

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """One list, best first: ids, and their scores float64[n]."""

    ids: Sequence[PointId]
    scores: Scores


def rrf(rankings, *, k=2, weights=None):
    """Reciprocal rank fusion as Qdrant computes it: the sum of 1 / (rank / weight + k - 1); k=61 is
    Cormack's 60.

    A weight of 0 or less adds nothing.
    """

    def part(ranking, weight):
        ranks = np.arange(1, len(ranking.ids) + 1)
        # A rank divided by next to nothing is infinite, and its part 0
        with np.errstate(over="ignore"):
            return np.zeros(len(ranks)) if weight <= 0 else 1.0 / (ranks / weight + k - 1)

    return _sum(
        rankings,
        [part(*pair) for pair in zip(rankings, weights or [1.0] * len(rankings), strict=True)],
    )


def weighted_sum(rankings, weights):
    """The sum of weight × score; a list that lacks a point adds 0, so let every list hold every
    candidate."""
    return _sum(
        rankings,
        [weight * ranking.scores for ranking, weight in zip(rankings, weights, strict=True)],
    )


def _sum(rankings, parts):
    """Best first; a stable order of ties."""
    totals = {}
    for ranking, part in zip(rankings, parts, strict=True):
        for identity, share in zip(ranking.ids, part.tolist(), strict=True):
            totals[identity] = totals.get(identity, 0.0) + share
    best = sorted(totals, key=lambda identity: -totals[identity])
    return Ranking(best, np.array([totals[identity] for identity in best]))
