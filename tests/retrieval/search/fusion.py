"""Ranks fused by qdrant-client: what tests hold the stores' answers against."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from qdrant_client.hybrid.fusion import reciprocal_rank_fusion

from hybridtei.retrieval.store.base import PointId, Stored


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """One list, best first: ids, and their scores float64[n]."""

    ids: Sequence[PointId]
    scores: NDArray[np.float64]


def rrf(rankings, *, k=2, weights=None):
    """Reciprocal rank fusion: the sum of 1 / (rank / weight + k - 1); k=61 is Cormack's 60."""
    lists = [
        [Stored(i, {}, {}, score) for i, score in zip(each.ids, each.scores, strict=True)]
        for each in rankings
    ]
    found = reciprocal_rank_fusion(lists, limit=10_000, ranking_constant_k=k, weights=weights)
    return Ranking([one.id for one in found], np.array([one.score for one in found]))
