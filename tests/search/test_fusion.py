"""The tests' own formula of fusion is Qdrant's, and the presets of weights are the published ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qdrant_client import models
from qdrant_client.hybrid.fusion import reciprocal_rank_fusion

from hybridtei.tasks.rerank import PRESETS
from tests.search.fusion import Ranking, rrf
from tests.store.stores import TOLERANCE

LISTS = st.lists(
    st.lists(st.tuples(st.integers(0, 12), st.floats(-5, 5, width=32)), max_size=8, unique_by=lambda pair: pair[0]),
    min_size=1,
    max_size=4,
)


@given(LISTS, st.integers(1, 70), st.data())
def test_rrf_agrees_with_qdrants_own(lists: list[list[tuple[int, float]]], k: int, data: st.DataObject) -> None:
    ordered = [sorted(pairs, key=lambda pair: -pair[1]) for pairs in lists]
    weights = data.draw(st.none() | st.lists(st.floats(-1, 9), min_size=len(lists), max_size=len(lists)))
    answers = [[models.ScoredPoint(id=i, version=0, score=score) for i, score in pairs] for pairs in ordered]
    theirs = reciprocal_rank_fusion(answers, limit=100, ranking_constant_k=k, weights=weights)
    rankings = [Ranking([i for i, _ in pairs], np.array([score for _, score in pairs])) for pairs in ordered]
    ours = rrf(rankings, k=k, weights=weights)
    found = dict(zip(ours.ids, ours.scores, strict=True))
    assert found == pytest.approx({point.id: point.score for point in theirs}, abs=TOLERANCE)


def test_presets_are_the_published_ones() -> None:
    assert list(PRESETS["m3"].by_name.values()) == [1.0, 0.3, 1.0]
    assert list(PRESETS["m3-long"].by_name.values()) == [0.15, 0.5, 0.35]
