"""`/rerank` and its kin: whose request a body is, shapes, order, limits and refusals."""

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

from hybridtei.models.checkpoint.rankers import PairTemplate
from tests.inference.engine import small
from tests.server.conftest import labelled
from tests.server.live import HANG, serving

TEXTS = ["the hybrid search", "one two three", "meaning by words"]
QUESTION = {"query": "one", "texts": TEXTS}
ASKED = {"query": "one", "documents": TEXTS}
PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]


def ranks(response):
    assert response.status_code == 200, response.text
    return [(item["index"], item["score"]) for item in response.json()]


@pytest.mark.parametrize(
    ("which", "body", "status", "error"),
    [
        ("dense_server", ASKED, 424, "Backend error: model is not a re-ranker model"),
        (
            "reranker",
            {"query": "one", "documents": [{"title": "x"}]},
            422,
            "Input validation error: `documents[0]` should be a text, or an object with a `text`; or name `rank_fields`",
        ),
        (
            "reranker",
            {**ASKED, "instruction": "judge"},
            422,
            "Input validation error: `instruction` is for rerankers that are language models; this one takes none",
        ),
        (
            "server",
            {**ASKED, "weights": "nobody's"},
            422,
            'Input validation error: `weights` is "nobody\'s"; known: m3, m3-long, m3-two, or a number for each kind',
        ),
    ],
)
def test_refusals(request, which, body, status, error):
    response = request.getfixturevalue(which).post("/rerank", body)
    assert (response.status_code, response.json()["error"]) == (status, error)


@pytest.mark.parametrize(
    ("body", "begin"),
    [
        ({"query": "one"}, "missing field `texts`"),
        ({"texts": ["one"]}, "missing field `query`"),
        ({"query": "one", "texts": "two"}, "texts: "),
        ({"query": "one", "documents": "two"}, "documents: "),
        ({"query": "one", "documents": [1]}, "documents[0]: "),
        ({**ASKED, "top_n": -1}, "top_n: "),
        ({**ASKED, "rank_fields": ["a"] * 33}, "rank_fields: expected `array` of length <= 32"),
    ],
)
def test_bodies_of_another_shape(reranker, body, begin):
    response = reranker.post("/rerank", body)
    assert response.status_code == 422
    message = f"Failed to deserialize the JSON body into the target type: {begin}"
    if "documents" not in body:
        assert response.text.startswith(message)
        return
    # infinity's client reads the list, Weaviate's module the text
    answer = response.json()
    assert answer["error"].startswith(message)
    assert [item["msg"] for item in answer["detail"]] == [answer["error"]]


def test_keys_decide_whose_request_it_is(reranker):
    plain = reranker.post("/rerank", QUESTION).json()
    both = {
        **QUESTION,
        "documents": 5,
        "top_n": 1,
        "return_documents": "yes",
        "user": {"x": [None]},
    }
    # TEI ignores what it does not know
    assert reranker.post("/rerank", both).json() == plain
    assert isinstance(reranker.post("/rerank", ASKED).json(), dict)


@pytest.mark.parametrize("path", PATHS)
def test_documents_get_one_object_for_all_clients(reranker, path):
    plain = ranks(reranker.post("/rerank", QUESTION))
    response = reranker.post(
        path, {**ASKED, "model": "any", "max_chunks_per_doc": 3, "priority": 0}
    )
    answer = response.json()
    assert answer["object"] == "rerank"
    assert answer["model"] == "small"
    assert isinstance(answer["id"], str)
    assert isinstance(answer["created"], int)
    # Voyage's clients read `data`, and a text
    texts = [{**item, "document": TEXTS[item["index"]]} for item in answer["results"]]
    assert answer["data"] == (answer["results"] if path == "/v2/rerank" else texts)
    assert [(item["index"], item["relevance_score"]) for item in answer["results"]] == plain
    for item in answer["results"]:
        # Cohere's v2 alone does not repeat documents
        document = {} if path == "/v2/rerank" else {"document": {"text": TEXTS[item["index"]]}}
        scored = {"index": item["index"], "relevance_score": item["relevance_score"]}
        assert item == scored | document
    tokens = int(response.headers["x-compute-tokens"])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["meta"]["tokens"] == {"input_tokens": tokens, "output_tokens": 0}
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert "scores" not in answer
    bare = reranker.post(path, {**ASKED, "return_documents": False}).json()["results"]
    assert not [item for item in bare if "document" in item]


@pytest.mark.parametrize(("documents", "units"), [(1, 1), (100, 1), (101, 2), (201, 3)])
def test_cohere_bills_a_search_of_a_hundred_documents(reranker, documents, units):
    answer = reranker.post("/v2/rerank", {"query": "one", "documents": ["two"] * documents}).json()
    assert answer["meta"]["billed_units"] == {"search_units": units}


@pytest.mark.parametrize("key", ["top_n", "top_k"])
@pytest.mark.parametrize(("most", "count"), [(1, 1), (2, 2), (9, 3), (0, 3), (None, 3)])
def test_the_best_of_them(reranker, key, most, count):
    found = reranker.post("/v1/rerank", {**ASKED, key: most}).json()["results"]
    assert found == reranker.post("/v1/rerank", ASKED).json()["results"][:count]


def documents_in(response):
    assert response.status_code == 200, response.text
    return [item["document"] for item in response.json()["results"]]


def test_documents_are_given_back_as_each_client_reads_them(reranker):
    order = [index for index, _ in ranks(reranker.post("/rerank", QUESTION))]
    objects = [{"text": TEXTS[index]} for index in order]
    strings = [TEXTS[index] for index in order]
    asked = {**ASKED, "return_documents": True}
    for path in PATHS:
        assert documents_in(reranker.post(path, asked)) == objects
    # Infinity's client
    assert documents_in(reranker.post("/rerank", {**asked, "raw_scores": False})) == strings
    assert documents_in(reranker.post("/v1/rerank", {**asked, "raw_scores": False})) == objects
    with serving(labelled("LABEL_0"), server={"rerank_documents_as": "string"}) as running:
        assert documents_in(running.post("/rerank", asked)) == strings
        assert documents_in(running.post("/v2/rerank", asked)) == objects


def test_documents_that_are_objects(reranker):
    objects = [{"text": text, "by": "x"} for text in TEXTS]
    found = reranker.post(
        "/v1/rerank", {"query": "one", "documents": objects, "return_documents": True}
    ).json()["results"]
    assert [(item["index"], item["relevance_score"]) for item in found] == ranks(
        reranker.post("/rerank", QUESTION)
    )
    assert [item["document"] for item in found] == [objects[item["index"]] for item in found]
    fields = [{"title": "one", "year": 5, "text": "ignored"}, {"year": 6}]
    named = reranker.post(
        "/v1/rerank", {"query": "two", "documents": fields, "rank_fields": ["title", "year"]}
    ).json()
    plain = ranks(reranker.post("/rerank", {"query": "two", "texts": ["one\n5", "6"]}))
    assert [(item["index"], item["relevance_score"]) for item in named["results"]] == plain


def test_a_field_named_often_is_read_once(reranker):
    """Else a document of 10 kB and a field named 400,000 times would be 4 GB."""
    document = {"title": "one " * 20, "year": 5}
    once, often = (
        reranker.post(
            "/v1/rerank", {"query": "two", "documents": [document], "rank_fields": fields}
        )
        for fields in (["title", "year"], ["title", "year"] * 16)
    )
    assert often.json()["results"] == once.json()["results"]
    assert often.headers["x-compute-characters"] == once.headers["x-compute-characters"]


ASKING = PairTemplate(
    prefix="", body="{instruction} {query} {document}", suffix="", instruction="by words"
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", lambda count: {"query": "one", "texts": ["two"] * count}),
        ("/v1/rerank", lambda count: {"query": "one", "documents": ["two"] * count}),
        ("/invocations", lambda count: {"query": "one", "texts": ["two"] * count}),
        ("/v1/score", lambda count: {"text_1": "one", "text_2": ["two"] * count}),
    ],
)
def test_an_instruction_is_bounded_by_itself_and_with_the_documents(path, body):
    spec = labelled("LABEL_0")
    spec = dataclasses.replace(spec, kind=dataclasses.replace(spec.kind, template=ASKING))
    with serving(
        spec, server={"max_client_batch_size": 10_000}, engine={"max_concurrent_requests": 10_000}
    ) as ranker:
        allowed = ranker.post(path, {**body(2), "instruction": "x " * 2048})
        long = ranker.post(path, {**body(1), "instruction": "x " * 2049})
        before = ranker.backend.forwards
        many = ranker.post(path, {**body(2000), "instruction": "x " * 2048})
        assert (allowed.status_code, long.status_code, many.status_code) == (200, 422, 422)
        assert "`instruction` holds 4098 characters > maximum allowed 4096" in long.text
        assert "for each of 2000 documents, 8192000 in all > maximum allowed 8000000" in many.text
        assert ranker.backend.forwards == before


@pytest.mark.parametrize("more", [{"return_documents": True}, {"property": ""}])
@pytest.mark.parametrize("inner", [10**30, json.loads("[" * 400 + "]" * 400)])
def test_documents_that_cannot_be_written_are_refused_where_they_would_be(reranker, more, inner):
    documents = ["one", {"text": "two", "by": inner}]
    response = reranker.post("/v1/rerank", {"query": "one", "documents": documents, **more})
    assert response.status_code == 422
    assert "`documents[1]` cannot be given back: " in response.json()["message"]
    assert reranker.post("/v1/rerank", {"query": "one", "documents": documents}).status_code == 200


def test_each_document_is_cut_to_so_many_tokens(reranker):
    long = ["one two three", "four five six seven"]
    cut = reranker.post(
        "/v2/rerank", {"query": "one", "documents": long, "max_tokens_per_doc": 2}
    ).json()
    plain = ranks(reranker.post("/rerank", {"query": "one", "texts": ["one two", "four five"]}))
    assert [(item["index"], item["relevance_score"]) for item in cut["results"]] == plain
    none = reranker.post(
        "/v2/rerank", {"query": "one", "documents": long, "max_tokens_per_doc": 0}
    ).json()
    assert none["usage"]["total_tokens"] == cut["usage"]["total_tokens"] + 3


def test_ten_thousand_documents_pass_in_parts(reranker):
    documents = [f"one {small.WORDS[i % 19]} {small.WORDS[i // 19 % 19]}" for i in range(10_000)]
    largest = 0

    def note(batch):
        nonlocal largest
        largest = max(
            largest,
            reranker.service.config.max_concurrent_requests - reranker.service.admission.free,
        )

    reranker.backend.gate, before = note, reranker.backend.forwards
    try:
        answer = reranker.post("/v1/rerank", {"query": "two", "documents": documents}).json()
    finally:
        reranker.backend.gate = None
    assert reranker.backend.forwards - before > 50
    # Permits, however many documents there are
    assert largest == 128
    assert len(answer["results"]) == len(documents)
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    for begin in (0, 4_321, 9_990):
        some = reranker.post("/rerank", {"query": "two", "texts": documents[begin : begin + 10]})
        assert {begin + index: score for index, score in ranks(some)}.items() <= scores.items()
    order = sorted(scores, key=lambda index: (scores[index], index), reverse=True)
    assert [item["index"] for item in answer["results"]] == order
    assert reranker.service.admission.free == reranker.service.config.max_concurrent_requests


def test_however_many_long_rankings_run_a_small_request_is_let_in():
    begun, go_on = threading.Event(), threading.Event()

    def hold(_):
        begun.set()
        assert go_on.wait(HANG)

    many = {"query": "two", "documents": ["one two"] * 1_000}
    with serving(labelled("LABEL_0")) as running, ThreadPoolExecutor(7) as clients:
        running.backend.gate = hold
        rankings = [clients.submit(running.post, "/v1/rerank", many) for _ in range(6)]
        assert begun.wait(HANG)
        # The others wait for the backend
        first = next(as_completed(rankings, HANG)).result()
        small_one = clients.submit(running.post, "/rerank", QUESTION)
        go_on.set()
        assert small_one.result(HANG).status_code == 200
        statuses = {ranking.result(HANG).status_code for ranking in rankings}
    assert first.status_code == 429
    assert statuses == {200, 429}


def test_documents_have_a_limit_of_their_own_and_few_permits_are_enough():
    limits = {"max_rerank_documents": 100, "max_client_batch_size": 2}
    with serving(
        labelled("LABEL_0"), server=limits, engine={"max_concurrent_requests": 4}
    ) as running:
        assert (
            len(
                running.post("/rerank", {"query": "one", "documents": ["two"] * 100}).json()[
                    "results"
                ]
            )
            == 100
        )
        refused = running.post("/rerank", {"query": "one", "documents": ["two"] * 101})
        assert refused.status_code == 422
        assert (
            refused.json()["error"]
            == "`documents` holds 101 documents > maximum allowed 100 (max-rerank-documents)"
        )
        assert running.post("/rerank", {"query": "one", "texts": ["two"] * 3}).status_code == 422
        assert running.service.admission.free == 4


def test_a_part_that_fails_fails_the_request_and_frees_its_permits():
    with serving(labelled("LABEL_0"), fail_on=small.IDS["poison"]) as running:
        documents = ["one"] * 300 + ["poison"] + ["two"] * 300
        failed = running.post("/v1/rerank", {"query": "one", "documents": documents})
        assert failed.status_code == 424
        assert running.service.admission.free == running.service.config.max_concurrent_requests
        assert (
            running.post("/v1/rerank", {"query": "one", "documents": documents[:300]}).status_code
            == 200
        )


def test_spans_need_multi_vectors(reranker):
    body = {"query": "one", "documents": ["one two"], "relevant_spans": {"mode": "enabled"}}
    refused = reranker.post("/rerank", body)
    assert refused.status_code == 422
    assert "`relevant_spans` needs a model that ranks by multi-vectors" in refused.json()["error"]
