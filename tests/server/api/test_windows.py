"""Documents longer than the model, read in windows of which the best one counts."""

import threading
from itertools import pairwise

import cohere
import httpx
import pytest

from hybridtei.server.context import CHUNK_DOCUMENTS
from tests.inference.engine import small
from tests.server.conftest import labelled
from tests.server.live import Hold, Running, serving, until

WORDS = [
    "the",
    "a",
    "hybrid",
    "search",
    "engine",
    "finds",
    "text",
    "by",
    "words",
    "and",
    "meaning",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
]
LONG = " ".join(WORDS[(place * 7 + place // 5) % len(WORDS)] for place in range(300))
DOCUMENTS = ["one two", LONG, "three", f"{LONG} four"]


def ranked(running, path="/v1/rerank", **fields):
    body = {"query": "two", "documents": DOCUMENTS, "raw_scores": True, **fields}
    answer = running.post(path, body)
    assert answer.status_code == 200, answer.text
    return {item["index"]: item for item in answer.json()["results"]}


@pytest.fixture(params=["reranker", "server"])
def ranking(request):
    """A reranker, and a model that ranks by vectors."""
    running: Running = request.getfixturevalue(request.param)
    return running


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_score_is_that_of_the_best_window_which_the_answer_names(ranking, path):
    items = ranked(ranking, path, max_chunks_per_doc=100)
    assert [index for index, item in sorted(items.items()) if "window" in item] == [1, 3]
    # Of 64 tokens, without the query and special tokens, or the prompt's, and two to spare
    room = 58 if ranking.service.model.spec.role == "reranker" else 52
    for index in (1, 3):
        begin, end = items[index]["window"]
        assert 0 <= begin < end <= len(DOCUMENTS[index])
        alone = ranked(ranking, documents=[DOCUMENTS[index][begin:end]])
        assert alone[0]["relevance_score"] == pytest.approx(
            items[index]["relevance_score"], abs=1e-6
        )
        windows = [*small.model().reader.windows(DOCUMENTS[index], room, 100, truncate=True)]
        assert windows[0][0] == 0
        assert windows[-1][1] == len(DOCUMENTS[index])
        assert all(end > begin for (_, end), (begin, _) in pairwise(windows))
        parts = [DOCUMENTS[index][begin:end] for begin, end in windows]
        scores = [item["relevance_score"] for item in ranked(ranking, documents=parts).values()]
        assert max(scores) == pytest.approx(items[index]["relevance_score"], abs=1e-6)
    cut = ranked(ranking)
    for index in (0, 2):
        assert items[index]["relevance_score"] == pytest.approx(
            cut[index]["relevance_score"], abs=1e-6
        )
    assert items[1]["relevance_score"] >= cut[1]["relevance_score"] - 1e-6


def test_what_lies_beyond_the_last_window_is_told(ranking):
    answer = ranking.post(
        "/v1/rerank", {"query": "two", "documents": DOCUMENTS, "max_chunks_per_doc": 100}
    )
    assert "x-hybridtei-truncated" not in answer.headers
    assert "truncated" not in answer.json()["usage"]
    body = {"query": "two", "documents": DOCUMENTS, "max_chunks_per_doc": 2}
    answer = ranking.post("/v1/rerank", body)
    first, second = answer.json()["usage"]["truncated"]
    assert (first["index"], second["index"]) == (1, 3)
    assert first["characters"][0] == 0
    one = ranking.post("/v1/rerank", {**body, "max_chunks_per_doc": 1}).json()["usage"]["truncated"]
    assert 1.5 * one[0]["characters"][1] < first["characters"][1] < 2 * one[0]["characters"][1]
    refused = ranking.post("/v1/rerank", {**body, "truncate": False})
    assert (refused.status_code, "documents[1]" in refused.text) == (422, True)
    whole = ranking.post("/v1/rerank", {**body, "truncate": False, "max_chunks_per_doc": 100})
    assert whole.status_code == 200


def test_windows_are_the_same_in_every_chunk(ranking):
    documents = [LONG if place in (3, 70, 149) else f"two {place}" for place in range(150)]
    items = ranked(ranking, documents=documents, max_chunks_per_doc=100)
    assert [index for index, item in sorted(items.items()) if "window" in item] == [3, 70, 149]
    alone = ranked(ranking, documents=[LONG], max_chunks_per_doc=100)[0]
    for index in (3, 70, 149):
        assert items[index]["window"] == alone["window"]
        assert items[index]["relevance_score"] == pytest.approx(alone["relevance_score"], abs=1e-6)


def test_a_query_that_leaves_no_room_cuts_as_before(ranking):
    query = "two " * 70
    assert ranked(ranking, query=query, max_chunks_per_doc=9).keys() == set(range(4))
    empty = ranked(ranking, query="two", documents=["", LONG], max_chunks_per_doc=9)
    assert "window" not in empty[0]


def test_the_flag_is_the_default_and_coheres_client_sends_the_field():
    with serving(
        labelled("LABEL_0"), server={"rerank_windows": 100, "max_rerank_documents": 40}
    ) as running:
        items = ranked(running)
        assert items[1] == ranked(running, max_chunks_per_doc=100)[1]
        texts = running.post(
            "/rerank", {"query": "two", "texts": DOCUMENTS, "raw_scores": True}
        ).json()
        scores = {item["index"]: item["score"] for item in texts}
        assert scores[1] == pytest.approx(items[1]["relevance_score"], abs=1e-6)
        client = cohere.Client(
            "-", base_url=running.url, httpx_client=httpx.Client(trust_env=False)
        )
        answer = client.rerank(query="two", documents=DOCUMENTS, model="any", max_chunks_per_doc=1)
        of_client = {item.index: item for item in answer.results}
        assert getattr(of_client[1], "window", None) is None
        # All windows of a request are at most --max-rerank-documents
        many = running.post(
            "/v1/rerank", {"query": "two", "documents": [LONG] * 20, "max_chunks_per_doc": 100}
        )
        assert many.json()["usage"]["truncated"][0]["characters"][1] < len(LONG)
        assert many.headers["x-hybridtei-truncated"] == "20"


def test_a_request_holds_a_permit_for_each_window_that_is_computed_at_once():
    """A document of some 700 windows holds as many permits as 128 documents."""
    hold = Hold()
    with serving(labelled("LABEL_0"), gate=hold) as running:
        free = running.service.config.max_concurrent_requests
        body = {"query": "two", "documents": [LONG * 100], "max_chunks_per_doc": 1000}
        asked = threading.Thread(target=running.post, args=("/v1/rerank", body))
        asked.start()
        try:
            until(lambda: running.service.admission.free == free - 2 * CHUNK_DOCUMENTS)
        finally:
            hold.let_go()
            asked.join()
        until(lambda: running.service.admission.free == free)
