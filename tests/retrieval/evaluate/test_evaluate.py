"""An evaluation over a small collection: its measures against their definitions, its parts against
what was searched."""

import json
import math

import numpy as np
import pytest

from hybridtei.client import AsyncClient
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.evaluate.measures import (
    MEASURES,
    WAYS,
    Evaluation,
    Judgements,
    Result,
    documents_of,
    evaluate,
    measures_of,
    paired_bootstrap,
    scores_by_rank,
)
from hybridtei.retrieval.evaluate.run import as_dict, as_json, as_table, check_chart, write_chart
from hybridtei.retrieval.search.options import SearchHit, SearchResult
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from tests.retrieval.search.small_search import FLOATS, MODEL, TEXTS, spec_in
from tests.server.live import serving

QUERIES = {"a": "three two", "b": "search by meaning", "c": "seven"}
RELEVANT = {"a": {"d0": 2, "d1": 1}, "b": {"d3": 1, "d5": 3}, "c": {"d7": 1, "d4": 1}}


def gains(ranked, judged):
    """Linear gains, discount log2(rank + 1)."""
    return sum(
        judged.get(document, 0) / math.log2(place + 1)
        for place, document in enumerate(ranked[:10], 1)
    )


def by_hand(rankings, judged):
    values = []
    for query, grades in judged.items():
        ranked = rankings[query]
        ideal = sorted(grades, key=grades.get, reverse=True)
        relevant = {document for document, grade in grades.items() if grade}
        places = [place for place, one in enumerate(ranked[:10], 1) if one in relevant]
        ndcg = gains(ranked, grades) / gains(ideal, grades)
        recall = len(relevant & set(ranked[:100])) / len(relevant)
        values.append((ndcg, 1 / places[0] if places else 0.0, recall))
    return dict(zip(MEASURES, np.mean(values, axis=0), strict=True))


def test_measures_are_as_defined():
    random = np.random.default_rng(3)
    names = [f"d{i}" for i in range(150)]
    judged = {
        f"q{q}": {
            str(d): int(g)
            for d, g in zip(random.choice(names, 20, False), random.integers(0, 4, 20), strict=True)
        }
        for q in range(12)
    }
    rankings = {
        q: [str(d) for d in random.permutation(names)[: 120 - 10 * i]] for i, q in enumerate(judged)
    }
    rankings["q3"] = []
    runs = {q: scores_by_rank(ranked) for q, ranked in rankings.items()}
    values = measures_of(runs, Judgements(dict.fromkeys(judged, ""), judged))
    assert {name: of_queries.mean() for name, of_queries in values.items()} == pytest.approx(
        by_hand(rankings, judged)
    )


def test_a_document_stands_where_its_best_chunk_does():
    assert scores_by_rank(["b", "a", "b", "c", "a"]) == {"b": -1.0, "a": -2.0, "c": -3.0}
    assert len(scores_by_rank([str(i) for i in range(500)])) == 100


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ({"sparse": None, "multivector": None}, ["dense"]),
        (
            {"multivector": None},
            [
                "dense",
                "sparse",
                "rrf k=2",
                "rrf k=61",
                "weighted",
                "weighted m3",
                "weighted m3-two",
                "zscore",
            ],
        ),
        ({}, [*WAYS]),
    ],
)
async def test_the_ways_are_those_that_the_vectors_allow(model, names, tmp_path):
    evaluation, _, _ = await evaluated(tmp_path, **model)
    assert [result.name for result in evaluation.results] == names


def test_an_interval_is_that_of_resampled_means():
    random = np.random.default_rng(1)
    differences = random.normal(0.02, 0.1, 400)
    mean, low, high = paired_bootstrap(differences)
    assert mean == pytest.approx(differences.mean())
    # Of a mean of 400
    error = differences.std() / 20
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)


@pytest.mark.parametrize(
    ("other", "chosen", "over"),
    [(0.9, "rrf", "zscore"), (0.5, "zscore", "rrf"), (0.1, "zscore", "rrf")],
)
def test_the_default_is_chosen_unless_another_way_is_above_it(other, chosen, over):
    noise = np.random.default_rng(2).normal(0, 0.05, 60)
    results = [
        result("rrf", other + noise),
        result("dense", np.zeros(60)),
        result("zscore", np.full(60, 0.5)),
    ]
    choice = Evaluation("papers", 60, np.ones(60), results).choice
    assert (choice.name, choice.over, choice.is_default) == (chosen, over, chosen == "zscore")
    assert choice.low <= choice.lead <= choice.high
    assert (choice.low > 0) == (other != 0.5)


def result(name, ndcg):
    return Result(name, dict.fromkeys(MEASURES, float(ndcg.mean())), np.ones(60), ndcg)


async def evaluated(folder, **model):
    """(the evaluation of a server, what it told, the hits of each query by dense vectors)."""

    told, schemas = [], CollectionSchemas(MemoryStore())
    with serving(spec_in(folder, **model), schemas=schemas, model_id=MODEL, model=FLOATS) as server:
        async with AsyncClient(server.url) as client:
            rows = [{"text": text, "id": f"d{place}"} for place, text in enumerate(TEXTS)]
            await client.upsert("papers", rows)
            judged = Judgements(QUERIES, RELEVANT)
            evaluation = await evaluate(
                client, "papers", judged, advance=lambda name, done: told.append((name, done))
            )
            found = {
                q: (await client.search("papers", text, mode="dense")).hits
                for q, text in QUERIES.items()
            }
    return evaluation, told, found


async def test_an_evaluation_is_what_searching_gives(tmp_path):
    evaluation, told, found = await evaluated(tmp_path)
    dense = evaluation.results[0]
    rankings = {q: [hit.payload["document_id"] for hit in hits] for q, hits in found.items()}
    assert dense.measures == pytest.approx(by_hand(rankings, RELEVANT))
    assert all(
        len(result.times_ms) == 3 and result.p95_ms >= result.p50_ms > 0
        for result in evaluation.results
    )
    assert len(evaluation.embed_ms) == 3 * len(WAYS)
    assert told[:4] == [("dense", 1), ("dense", 2), ("dense", 3), ("sparse", 1)]

    table = as_table(evaluation)
    for result in evaluation.results:
        assert result.name in table
        assert f"{result.measures['nDCG@10']:.4f}" in table
        assert result.ndcg.mean() == pytest.approx(result.measures["nDCG@10"])
    assert f"choose {evaluation.choice.name}" in table
    assert as_dict(evaluation)["choice"]["name"] == evaluation.choice.name
    assert json.loads(as_json(evaluation)) == as_dict(evaluation)
    for name, begins in (("chart.png", b"\x89PNG"), ("chart.svg", b"<?xml")):
        write_chart(evaluation, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_rows_of_two_files_with_one_id_are_two_documents():
    """The one that is found first is the judged one; the other keeps its place, and is not
    relevant."""
    rows = [("a", "d1"), ("b", "d1"), ("a", "d2"), (None, "d2"), ("a", "d1")]
    hits = [
        SearchHit(place, 1.0, {"document_id": name, "source": source})
        for place, (source, name) in enumerate(rows)
    ]
    documents = documents_of(SearchResult("dense", [*hits, SearchHit(9, 0.5, {})], []))
    assert documents == ["d1", "b d1", "d2", "None d2", "d1", "9"]


def test_a_chart_of_an_unknown_kind_or_place_is_refused_before_the_work(tmp_path):
    for path in (tmp_path / "chart.txt", tmp_path / "nowhere" / "chart.png"):
        with pytest.raises(InvalidInput, match="chart"):
            check_chart(path)
