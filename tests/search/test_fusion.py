from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qdrant_client import models
from qdrant_client.hybrid.fusion import reciprocal_rank_fusion

from hybridtei.errors import InvalidInput
from hybridtei.tasks.rerank import PRESETS
from tests.search.fusion import Fused, Ranking, min_max, rrf, weighted_sum, z_scores
from tests.store.stores import TOLERANCE


def ranking(**scores: float) -> Ranking:
    return Ranking(list(scores), np.array(list(scores.values()), dtype=np.float64))


ABC, BD = ranking(a=0.9, b=0.5, c=0.1), ranking(b=7.0, d=3.0)


def table(fused: Fused) -> dict[Any, float]:
    return dict(zip(fused.ids, fused.scores.tolist(), strict=True))


@pytest.mark.parametrize(
    ("fused", "expected"),
    [
        (rrf([ABC, BD]), {"b": 0.8333, "a": 0.5, "d": 0.3333, "c": 0.25}),
        (rrf([ABC, BD], k=60, weights=[3, 1]), {"b": 0.033426, "a": 0.016854, "c": 0.016667, "d": 0.016393}),
        (weighted_sum([ABC, BD], [1.0, 0.1]), {"b": 1.2, "a": 0.9, "d": 0.3, "c": 0.1}),
        (min_max([ABC, BD], [0.5, 0.5]), {"b": 0.75, "a": 0.5, "d": 0.0, "c": 0.0}),
        (z_scores([ABC, BD]), {"b": 0.7071, "a": 0.2929, "d": -1.7071, "c": -1.7071}),
    ],
)
def test_worked_numbers(fused: Fused, expected: dict[str, float]) -> None:
    assert list(table(fused)) == list(expected)
    assert table(fused) == pytest.approx(expected, abs=1e-4)


def test_a_list_without_spread_says_nothing() -> None:
    flat = Ranking([1, 2, 3], np.full(3, 0.1))  # whose deviation is not quite 0 in binary
    assert z_scores([flat]).scores.tolist() == [0.0] * 3
    assert min_max([flat]).scores.tolist() == [1.0] * 3


def test_k_61_is_the_literatures_60() -> None:
    lists = [ABC, BD]
    expected = {name: sum(1 / (60 + r.ids.index(name) + 1) for r in lists if name in r.ids) for name in "abcd"}
    assert table(rrf(lists, k=61)) == pytest.approx(expected)


LISTS = st.lists(
    st.lists(st.tuples(st.integers(0, 12), st.floats(-5, 5, width=32)), max_size=8, unique_by=lambda pair: pair[0]),
    min_size=1,
    max_size=4,
)


def rankings(lists: list[list[tuple[int, float]]]) -> list[Ranking]:
    ordered = [sorted(pairs, key=lambda pair: -pair[1]) for pairs in lists]
    return [Ranking([pair[0] for pair in pairs], np.array([pair[1] for pair in pairs])) for pairs in ordered]


def answers(lists: list[Ranking]) -> list[list[models.ScoredPoint]]:
    return [
        [models.ScoredPoint(id=i, version=0, score=float(score)) for i, score in zip(each.ids, each.scores, strict=True)]
        for each in lists
    ]


@given(LISTS, st.integers(1, 70), st.data())
def test_rrf_agrees_with_qdrants_own(lists: list[list[tuple[int, float]]], k: int, data: st.DataObject) -> None:
    given_lists = rankings(lists)
    weights = data.draw(st.none() | st.lists(st.floats(-1, 9), min_size=len(lists), max_size=len(lists)))
    theirs = reciprocal_rank_fusion(answers(given_lists), limit=100, ranking_constant_k=k, weights=weights)
    assert table(rrf(given_lists, k=k, weights=weights)) == pytest.approx({p.id: p.score for p in theirs}, abs=TOLERANCE)


@given(LISTS, st.randoms())
def test_order_is_by_score_then_best_rank_then_id(lists: list[list[tuple[int, float]]], random: Any) -> None:
    given_lists = rankings(lists)
    shuffled = given_lists.copy()
    random.shuffle(shuffled)
    for fuse in (rrf, weighted_sum, min_max, z_scores):
        fused = fuse(given_lists)
        assert fuse(shuffled).ids == fused.ids
        best = {i: min(each.ids.index(i) for each in given_lists if i in each.ids) for i in fused.ids}
        keys = [(-float(f"{s:.12g}"), best[i], i) for i, s in zip(fused.ids, fused.scores, strict=True)]
        assert keys == sorted(keys)


@given(LISTS)
def test_parts_explain_every_score(lists: list[list[tuple[int, float]]]) -> None:
    given_lists = rankings(lists)
    for fuse in (rrf, weighted_sum, min_max, z_scores):
        fused = fuse(given_lists)
        np.testing.assert_allclose(fused.parts.sum(axis=1), fused.scores)
        for column, each in enumerate(given_lists):
            for row, identity in enumerate(fused.ids):
                if identity in each.ids:
                    at = each.ids.index(identity)
                    assert fused.ranks[row, column] == at + 1
                    assert fused.given[row, column] == each.scores[at]
                else:
                    assert fused.ranks[row, column] == 0
                    assert np.isnan(fused.given[row, column])


def test_integers_come_before_uuids_among_ties() -> None:
    tied = [Ranking([7, 3], np.array([1.0, 1.0])), Ranking(["b", "a"], np.array([1.0, 1.0]))]
    assert weighted_sum(tied).ids == [7, "b", 3, "a"]


def test_weights_are_one_a_list() -> None:
    for fuse in (rrf, weighted_sum, min_max, z_scores):
        with pytest.raises(InvalidInput, match="`weights` are 1, should be as many as there are lists, 2"):
            fuse([ABC, BD], weights=[1.0])


def test_nothing_fused_is_nothing() -> None:
    for fuse in (rrf, weighted_sum, min_max, z_scores):
        assert fuse([Ranking([], np.zeros(0))]).ids == []
        assert fuse([]).ids == []


def test_presets_are_the_published_ones() -> None:
    assert list(PRESETS["m3"].by_name.values()) == [1.0, 0.3, 1.0]
    assert list(PRESETS["m3-long"].by_name.values()) == [0.15, 0.5, 0.35]
