"""Searching a vector store over HTTP: the whole way, with a real engine and a real store."""

from dataclasses import replace

import pytest
from msgspec import convert

from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.server.api import search as api
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_of, filled, run
from tests.server.api.conftest import POINTS
from tests.server.live import serving

QUERY = "the search engine"
SPANS = {"mode": "enabled", "threshold": 0.0}
ASKED = {"collection": "papers", "query": QUERY}
UPSERT = "/collections/papers/points"


@pytest.fixture(scope="module")
def engine(spec, tmp_path_factory):
    """A server with the embedded engine, and ten texts in it."""
    store = EmbeddedStore(str(tmp_path_factory.mktemp("store")))
    with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL) as running:
        assert running.post(UPSERT, {"points": POINTS, "create": True}).status_code == 200
        yield running


def test_a_search_gives_what_numpy_gives(shelf, spec):
    encoder = encoder_of(spec)
    scores = (
        encoder.encode(TEXTS, input_type="document").dense
        @ encoder.encode([QUERY], input_type="query").dense[0]
    )
    before = shelf.backend.forwards
    response = shelf.post(
        "/search",
        {**ASKED, "mode": "dense", "limit": 4, "group_by": None},
    )
    assert shelf.backend.forwards == before + 1
    answer = response.json()
    assert (answer["model"], answer["mode"]) == (MODEL, "dense")
    assert [hit["score"] for hit in answer["hits"]] == pytest.approx(
        sorted(scores, reverse=True)[:4], abs=1e-5
    )
    for hit in answer["hits"]:
        assert scores[hit["id"]] == pytest.approx(hit["score"], abs=1e-5)
        assert hit["payload"] == {
            "text": TEXTS[hit["id"]],
            "metadata": {"place": hit["id"]},
            "document_id": str(hit["id"]),
        }
        assert list(hit) == ["id", "score", "payload"]
    assert [stage["name"] for stage in answer["stages"]] == ["embed", "search"]
    assert int(response.headers["x-compute-tokens"]) > 0


def test_everything_at_once(shelf):
    body = {
        **ASKED,
        "mode": "rrf",
        "rrf_k": 61,
        "weights": [1.0, 0.5],
        "rescore": True,
        "limit": 3,
        "offset": 1,
        "filter": {"must_not": [{"key": "metadata.place", "match": {"value": 2}}]},
        "with_payload": ["document_id"],
        "highlights": True,
        "explain": True,
    }
    answer = shelf.post("/search", body).json()
    assert len(answer["hits"]) == 3
    for place, hit in enumerate(answer["hits"], 2):
        assert hit["id"] != 2
        assert list(hit["payload"]) == ["document_id"]
        assert hit["scores"]["multivector"] == {"score": pytest.approx(hit["score"]), "rank": place}
        assert {"dense", "multivector"} <= hit["scores"].keys()
        for mark in hit["highlights"]:
            assert TEXTS[hit["id"]][mark["start"] : mark["end"]] == mark["text"]
    assert [stage["name"] for stage in answer["stages"]] == [
        "embed",
        "dense",
        "sparse",
        "multivector",
        "search",
    ]


def test_relevant_spans_are_those_of_rerank(shelf):
    """One more pass a query, whatever payload is asked for; without a hit, none."""
    body = {
        "collection": "papers",
        "queries": [QUERY, "one two"],
        "limit": 5,
        "with_payload": ["document_id"],
    }
    plain = shelf.post("/search", body).json()["results"]
    off = shelf.post("/search", {**body, "relevant_spans": {"mode": "disabled"}}).json()["results"]
    assert [one["hits"] for one in off] == [one["hits"] for one in plain]
    before = shelf.backend.forwards
    results = shelf.post("/search", {**body, "relevant_spans": SPANS}).json()["results"]
    assert shelf.backend.forwards > before + 1
    for query, one, without in zip(body["queries"], results, plain, strict=True):
        texts = [TEXTS[hit["id"]] for hit in one["hits"]]
        ranked = shelf.post(
            "/v2/rerank", {"query": query, "documents": texts, "relevant_spans": SPANS}
        ).json()["results"]
        of_text = {
            item["index"]: item["relevant_spans"] for item in ranked if "relevant_spans" in item
        }
        assert of_text
        assert [hit.pop("relevant_spans", None) for hit in one["hits"]] == [
            of_text.get(i) for i in range(len(texts))
        ]
        assert one["hits"] == without["hits"]
    bare = shelf.post("/search", {**body, "relevant_spans": SPANS, "with_payload": False}).json()[
        "results"
    ]
    assert [hit["payload"] for one in bare for hit in one["hits"]] == [{}] * 10
    nothing = {"must": [{"key": "metadata.place", "match": {"value": 99}}]}
    found = shelf.post(
        "/search",
        {**ASKED, "filter": nothing, "relevant_spans": SPANS},
    ).json()
    assert found["hits"] == []


def test_relevant_spans_of_long_texts_are_cut(shelf, monkeypatch):
    monkeypatch.setattr(api, "MAX_SPANNED_CHARACTERS", 20)
    body = {"collection": "papers", "query": "engine", "limit": 2, "relevant_spans": SPANS}
    hits = shelf.post("/search", body).json()["hits"]
    assert len(hits) == 2
    assert all(span["end"] <= 10 for hit in hits for span in hit["relevant_spans"])


def test_relevant_spans_need_texts_and_multivectors(spec):
    body = {**ASKED, "relevant_spans": SPANS}
    encoder = encoder_of(spec)
    some = run(
        filled(encoder, payload_of=lambda place: {"text": TEXTS[place]} if place else {"text": ""})
    )
    none = run(filled(encoder, payload_of=lambda place: {"text": None}))
    for store, answered in ((some, True), (none, False)):
        with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL) as running:
            answer = running.post("/search", body)
            assert answer.status_code == (200 if answered else 422)
            if answered:
                assert {
                    hit["id"] for hit in answer.json()["hits"] if "relevant_spans" not in hit
                } >= {0}
            else:
                assert (
                    "`relevant_spans`: nothing that was found in `papers` has a `text`"
                    in answer.json()["error"]
                )
    lean = replace(spec, kind=replace(spec.kind, multivector=None))
    with serving(lean, schemas=CollectionSchemas(MemoryStore()), model_id=MODEL) as running:
        assert running.post(UPSERT, {"points": POINTS, "create": True}).status_code == 200
        before = running.backend.forwards
        answer = running.post("/search", body)
        assert (answer.status_code, running.backend.forwards) == (422, before)
        assert "`relevant_spans` needs multi-vectors" in answer.json()["error"]


def test_a_query_that_is_looked_up_costs_no_pass_and_says_so(shelf):
    before = shelf.backend.forwards
    body = {**ASKED, "query_encoder": "table"}
    sparse = shelf.post("/search", {**body, "mode": "sparse"})
    assert shelf.backend.forwards == before
    assert sparse.json()["query_encoder"] == "table"
    assert sparse.json()["hits"]
    assert int(sparse.headers["x-compute-tokens"]) == 3
    hybrid = shelf.post("/search", body).json()
    # Dense and multi-vectors are the model's
    assert shelf.backend.forwards == before + 1
    assert (hybrid["mode"], hybrid["query_encoder"]) == ("zscore", "table")
    assert "query_encoder" not in shelf.post("/search", ASKED).json()


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ({"collection": "nowhere"}, 404, "there is no collection `nowhere`"),
        ({"query": None}, 422, "either `query` or `queries`"),
        ({"queries": ["two"]}, 422, "either `query` or `queries`"),
        ({"query": " "}, 422, "`query` is empty"),
        ({"query": None, "queries": ["one", ""]}, 422, "`queries[1]` is empty"),
        ({"mode": "dense", "rrf_k": 2}, 422, "`rrf_k` means nothing"),
        ({"filter": {"must": [{"key": "a", "range": {"gte": []}}]}}, 422, "`filter.must[0]"),
        (
            {"filter": {"must": [{"has_id": [1]}] * 101}},
            422,
            "`filter` holds more than 100 conditions",
        ),
        ({"filter": {"must": [[]] * 50_000}}, 422, "`filter` has more than 100000 bytes"),
        ({"filter": '{"must": []}'}, 422, "`filter` should be an object"),
        ({"rerank": True}, 422, "no reranker is loaded"),
        ({"rerank_threshold": 0.5}, 422, "`rerank_threshold` is for a reranker"),
        (
            {"min_probability": 0.5},
            422,
            "`min_probability` needs a curve of this way of searching (zscore, dense=1",
        ),
        (
            {"query": None, "queries": ["one"] * 33},
            422,
            "batch size 33 > maximum allowed batch size 32",
        ),
    ],
)
def test_what_is_wrong_is_told_by_name(shelf, more, status, message):
    response = shelf.post("/search", {**ASKED, **more})
    assert response.status_code == status
    assert message in response.json()["error"]


def test_a_bad_shape_is_refused_before_any_work(shelf):
    before = shelf.backend.forwards
    for more in (
        {"mode": "best"},
        {"query": 3},
        {"with_payload": ["a"] * 101},
        {"with_payload": ["a" * 1001]},
        {"legs": ["dense"] * 11},
        {"weights": [1.0] * 11},
        {"weights": {str(n): 1.0 for n in range(11)}},
        {"weights": "m" * 101},
        {"min_probability": 1.01},
    ):
        response = shelf.post("/search", {**ASKED, **more})
        assert response.status_code == 422
        assert response.text.startswith("Failed to deserialize the JSON body")
    assert shelf.post("/search", []).status_code == 422
    assert shelf.backend.forwards == before


def test_each_key_of_a_payload_is_looked_up_once(shelf):
    """A name that is repeated costs nothing for each hit."""
    body = {**ASKED, "with_payload": ["text", "document_id"] * 50}
    assert convert(body, api.SearchRequest).with_payload == ["text", "document_id"]
    hits = shelf.post("/search", body).json()["hits"]
    assert {tuple(hit["payload"]) for hit in hits} == {("text", "document_id")}


def test_a_server_without_a_store_says_how_to_get_one(server):
    bodies = {"/search": {"collection": "papers", "query": "one"}, UPSERT: {}}
    for response in (
        *(server.post(path, body) for path, body in bodies.items()),
        server.get("/collections"),
    ):
        assert response.status_code == 404
        assert (
            response.json()["error"]
            == "this server has no vector store: start it with --qdrant-url or --qdrant-path"
        )


@pytest.mark.parametrize("number", [2**64, 10**30, -(10**30)])
def test_numbers_beyond_64_bits_are_refused_by_name(shelf, number):
    answer = shelf.post(UPSERT, {"points": [{"id": number, "text": "one"}]}).json()
    assert answer["failed"] == [
        {"index": 0, "id": None, "error": f"points[0]: `id` should be between 0 and {2**64 - 1}"}
    ]
    condition = {"must": [{"key": "n", "match": {"value": number}}]}
    response = shelf.post("/search", {**ASKED, "filter": condition})
    assert (response.status_code, response.json()["error"][:47]) == (
        422,
        "Input validation error: `filter` cannot be read",
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"query": "one", "prefetch_limit": 3201},
            "`prefetch_limit` is 3201; one search looks at 3200 points",
        ),
        ({"query": "one", "limit": 2000, "offset": 1201}, "`offset` + `limit` is 3201; one search"),
        (
            {"queries": ["one"] * 30, "limit": 200},
            "`offset` + `limit` is 200 for each of 30 `queries`; one search",
        ),
        (
            {"query": "one", "limit": 201, "highlights": True},
            "`limit` is 201; with `highlights`, 200 hits are the most",
        ),
        (
            {"queries": ["one"] * 3, "limit": 67, "highlights": True},
            "`limit` is 67 for each of 3 `queries`; with `highl",
        ),
        (
            {"query": "one", "limit": 101, "relevant_spans": SPANS},
            "`limit` is 101; with `relevant_spans`, 100 hits",
        ),
        (
            {"queries": ["one"] * 3, "limit": 34, "relevant_spans": SPANS},
            "`limit` is 34 for each of 3 `queries`; with `rel",
        ),
    ],
)
def test_a_search_that_would_look_at_too_many_points_is_refused_before_any_work(
    shelf, more, message
):
    before = shelf.backend.forwards
    response = shelf.post("/search", {"collection": "papers", **more})
    assert (response.status_code, response.json()["error_type"]) == (422, "Validation")
    assert message in response.json()["error"]
    assert shelf.backend.forwards == before


def test_flags_say_how_much_a_search_may_hold(spec):
    flags = {"max_search_points": 100_000, "max_search_bytes": 60}
    with serving(
        spec, server=flags, schemas=CollectionSchemas(MemoryStore()), model_id=MODEL
    ) as running:
        running.post(UPSERT, {"points": POINTS, "create": True})
        wide = {**ASKED, "prefetch_limit": 100_000, "group_by": None}
        response = running.post("/search", wide)
        assert (
            response.status_code,
            "60 bytes (max-search-bytes)" in response.json()["error"],
        ) == (422, True)
        assert len(running.post("/search", {**wide, "with_payload": False}).json()["hits"]) == 10
        assert (
            'hybridtei_refusals_total{limit="max_search_bytes"} 1' in running.get("/metrics").text
        )


@pytest.mark.parametrize("key", ["a[", "a..b"])
def test_a_filter_that_the_store_refuses_is_the_clients_mistake(engine, key):
    condition = {"must": [{"key": key, "match": {"value": 1}}]}
    refused = engine.post("/search", {**ASKED, "filter": condition})
    assert refused.status_code == 422, refused.text


@pytest.mark.parametrize("key", ["a", "a b", "a[", 'a"', "", "\u200b", "東京"])
def test_a_payload_is_returned_by_any_of_its_keys(engine, key):
    point = {"id": 99, "text": "hybrid search", "payload": {key: 1, "b": 2}}
    assert engine.post(UPSERT, {"points": [point]}).json()["upserted"] == 1
    only = {"must": [{"has_id": [99]}]}
    (hit,) = engine.post("/search", {**ASKED, "filter": only, "with_payload": [key]}).json()["hits"]
    assert hit["payload"] == {key: 1}


@pytest.mark.parametrize("identity", [-1, 2**64, 10**60])
def test_a_number_that_no_point_may_have_is_an_unknown_id(engine, identity):
    assert engine.post(f"{UPSERT}/delete", {"ids": [identity]}).json() == {"points": 0}
    assert engine.get(f"{UPSERT}/{identity}").status_code == 404
