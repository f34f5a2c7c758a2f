"""Reranking until a budget of time is used. No test asserts a duration: a gate holds passes, or the
pace of the model is set."""

import threading

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small import tiny
from hybridtei.inference.tasks.budget import FEW_DOCUMENTS, GROWTH, TimedRanking, fitting
from hybridtei.inference.tasks.rerank import Rerank, Scored
from hybridtei.options import RankOptions
from tests.server.conftest import labelled
from tests.server.live import Hold, Running, commanded, serving, until

DOCUMENTS = [f"one two {place}" for place in range(100)]


def ranked(running, path="/v1/rerank", **fields):
    body = {"query": "two", "documents": DOCUMENTS, "raw_scores": True, **fields}
    answer = running.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(params=["reranker", "server"])
def ranking(request):
    running: Running = request.getfixturevalue(request.param)
    return running


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_with_enough_time_nothing_changes(ranking, path):
    answer, whole = ranked(ranking, path, budget_ms=600_000), ranked(ranking, path)
    assert answer["budget"] == {"scored": 100, "of": 100, "cut": False}
    scores, expected = (
        {item["index"]: item["relevance_score"] for item in results["results"]}
        for results in (answer, whole)
    )
    assert scores == pytest.approx(expected, abs=1e-6)
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    assert "budget" not in whole
    assert answer["usage"]["total_tokens"] > 0


def test_the_deadline_holds_for_the_first_pass_too():
    """The gate holds every pass beyond the budget."""
    hold = Hold()
    with serving(labelled("LABEL_0"), gate=hold) as running:
        released = threading.Timer(1.0, hold.let_go)
        released.start()
        answer = ranked(running, budget_ms=50)
        released.join()
        assert answer["budget"] == {"scored": 0, "of": 100, "cut": True}
        assert [item["index"] for item in answer["results"]] == [*range(100)]
        free = running.service.config.max_concurrent_requests
        until(lambda: running.service.admission.free == free)


def timed(documents):
    return TimedRanking(Rerank("two", documents, RankOptions(deadline_ns=1)), 512)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=80), st.data())
def test_a_ranking_scores_its_documents_in_their_order_and_each_once(lengths, data):
    documents = ["x" * length for length in lengths]
    ranking, sizes = timed(documents), []
    while part := ranking.following(data.draw(st.integers(-1, 10_000_000))):
        assert list(part.inputs) == documents[ranking.done : ranking.done + len(part.inputs)]
        assert part.options.deadline_ns is None
        # What costs nothing at first does not fill the passes after it
        assert len(part.inputs) <= max(FEW_DOCUMENTS, GROWTH * ranking.done)
        sizes.append(len(part.inputs))
        ranking.scored(
            Scored(np.arange(len(part.inputs), dtype=np.float32)), data.draw(st.integers(0, 10**7))
        )
    answer = ranking.answer()
    assert (len(answer.scores), answer.unscored) == (len(documents), len(documents) - sum(sizes))
    assert answer.order[sum(sizes) :] == [*range(sum(sizes), len(documents))]


def test_a_slow_pass_is_cancelled_and_what_is_scored_is_answered():
    """The gate holds the second pass beyond the budget."""
    hold = Hold()
    passes = 0

    def slow(batch):
        nonlocal passes
        passes += 1
        if passes == 2:
            hold(batch)

    with serving(labelled("LABEL_0"), gate=slow) as running:
        released = threading.Timer(1.0, hold.let_go)
        released.start()
        answer = ranked(running, budget_ms=200)
        released.join()
        budget = answer["budget"]
        assert (budget["of"], budget["cut"]) == (100, True)
        assert 0 <= budget["scored"] <= FEW_DOCUMENTS
        rest = [item["index"] for item in answer["results"]][budget["scored"] :]
        assert rest == [*range(budget["scored"], 100)]
        # Every permit is there again
        free = running.service.config.max_concurrent_requests
        until(lambda: running.service.admission.free == free)


def test_an_error_names_its_document_in_whichever_pass(server):
    documents = [*DOCUMENTS[:50], "", *DOCUMENTS[50:]]
    refused = server.post("/v1/rerank", {"query": "", "documents": documents, "budget_ms": 60_000})
    assert (refused.status_code, "documents[50]" in refused.text) == (400, True), refused.text


@pytest.mark.parametrize("budget_ms", [0, -1, 600_001, 1.5, "soon"])
def test_a_budget_is_milliseconds(reranker, budget_ms):
    answer = reranker.post(
        "/v1/rerank", {"query": "two", "documents": ["x"], "budget_ms": budget_ms}
    )
    assert (answer.status_code, "budget_ms" in answer.text) == (422, True)


def test_passes_take_half_of_the_time_that_is_left():
    costs = [100] * 64
    assert fitting(costs, 10_000, None) == FEW_DOCUMENTS
    assert fitting(costs, 0, None) == fitting(costs, 0, 1.0) == 0
    assert fitting(costs, 10_000, 1.0) == 50
    assert fitting(costs, 1_000, 1.0) == 5
    assert fitting(costs, 500, 1.0) == 5 - 1
    assert fitting(costs, 250, 1.0) == 2
    assert fitting(costs, 99, 1.0) == fitting(costs, -5, 1.0) == 0
    assert fitting(costs, 1_000_000, 1.0) == 64


def test_a_search_counts_what_it_ranked(hybrid, tmp_path):
    ranker = tiny.write_classifier(tmp_path / "ranker", "bert")
    flags = [
        "--model-id",
        str(hybrid),
        "--model-id",
        str(ranker),
        "--qdrant-path",
        str(tmp_path / "store"),
    ]
    with (
        commanded(*flags) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        points = [{"id": place, "text": f"baka bulo {'mo ' * place}"} for place in range(30)]
        body = {"points": points, "create": True}
        assert client.post("/collections/papers/points", json=body).json()["upserted"] == 30
        asked = {
            "collection": "papers",
            "query": "baka",
            "rerank": True,
            "rerank_limit": 30,
            "limit": 30,
        }
        whole = client.post("/search", json=asked).json()
        assert "budget" not in whole
        answer = client.post("/search", json={**asked, "budget_ms": 60_000}).json()
        assert answer["budget"] == {"scored": 30, "of": 30, "cut": False}
        assert [hit["id"] for hit in answer["hits"]] == [hit["id"] for hit in whole["hits"]]
        first = client.post("/search", json={**asked, "rerank": False}).json()
        short = client.post("/search", json={**asked, "budget_ms": 1}).json()
        budget = short["budget"]
        assert (budget["of"], budget["cut"]) == (30, True)
        order = [hit["id"] for hit in first["hits"]]
        assert [hit["id"] for hit in short["hits"]][budget["scored"] :] == order[budget["scored"] :]
        several = client.post(
            "/search",
            json={**asked, "query": None, "queries": ["baka", "bulo"], "budget_ms": 60_000},
        )
        assert [result["budget"]["scored"] for result in several.json()["results"]] == [30, 30]
        refused = client.post("/search", json={**asked, "rerank": False, "budget_ms": 5})
        assert (refused.status_code, "budget_ms" in refused.text) == (422, True)
        # Hits that were not scored in time have the lowest score, which no curve was fitted to
        cut = {**asked, "budget_ms": 60_000, "min_probability": 0.5}
        refused = client.post("/search", json=cut)
        assert (refused.status_code, "that stops at `budget_ms`" in refused.text) == (422, True)
        middle = whole["hits"][10]["score"]
        above = client.post("/search", json={**asked, "rerank_threshold": middle}).json()
        assert above["answerable"] is True
        assert [hit["id"] for hit in above["hits"]] == [
            hit["id"] for hit in whole["hits"] if hit["score"] >= middle
        ]
        none = client.post("/search", json={**asked, "rerank_threshold": 2}).json()
        assert (none["hits"], none["answerable"]) == ([], False)
