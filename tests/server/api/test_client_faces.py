"""What clients of OpenAI's, Cohere's, Voyage's, infinity's and Ollama's servers rely on, which TEI
has not."""

import json
from datetime import UTC, datetime

import pytest

from hybridtei.server.routing import ROUTES
from tests.server.live import serving


@pytest.fixture(scope="module")
def tei():
    with serving(server={"only_tei_routes": True}) as running:
        yield running


def own_ids(server, text):
    """The ids of a text, with the special tokens."""
    tokens = server.post("/tokenize", {"inputs": text}).json()[0]
    return [token["id"] for token in tokens]


def test_ids_without_the_special_tokens_are_refused(server):
    ids = own_ids(server, "one two")
    assert server.post("/v1/embeddings", {"input": [ids, ids[:-1]]}).status_code == 422
    answer = server.post("/v1/embeddings", {"input": [ids, ids[1:]]})
    assert answer.status_code == 422
    message = answer.json()["message"]
    assert "`input[1]` holds ids without the special tokens of this model's texts" in message
    assert "check_embedding_ctx_length=False" in message


def test_tei_embeds_ids_without_special_tokens(tei):
    ids = own_ids(tei, "one two")
    assert tei.post("/v1/embeddings", {"input": [ids[1:]]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a", "encoding_format": None, "sparse_format": None}),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "truncate": None}),
        ("/api/embed", {"input": "a", "truncate": None, "dimensions": None}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": None, "truncation": None}),
        ("/embed_hybrid", {"inputs": "a", "outputs": None}),
    ],
)
def test_null_is_as_absent(server, path, body):
    given = {name: value for name, value in body.items() if value is not None}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    expected = server.post(path, given).json()
    for name in set(expected) - {"id", "total_duration", "load_duration"} if path[1] != "e" else ():
        assert answer.json()[name] == expected[name]


BAD_REQUESTS = [
    ("POST", "/v1/embeddings", b"{", 400),
    ("POST", "/v1/embeddings", b'{"input": ""}', 400),
    ("POST", "/v1/embeddings", b"{}", 422),
    ("POST", "/v1/rerank", b'{"query": "a", "documents": []}', 400),
    ("POST", "/v2/embed", b"[]", 422),
    ("GET", "/v1/nothing", b"", 404),
    ("GET", "/v1/models/nothing", b"", 404),
    ("DELETE", "/v1/embeddings", b"", 405),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), BAD_REQUESTS)
def test_errors_have_the_formats_of_openai_and_of_today(server, method, path, body, status):
    headers = {"content-type": "application/json"}
    answer = server.client.request(method, path, content=body, headers=headers)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert content["code"] == status
    assert set(content["error"]) == {"message", "type", "code", "param"}
    assert content["error"]["message"] == content["message"] != ""
    assert content["error"]["type"] == content["type"]
    assert content["error"]["code"] == str(status)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [[1, 2]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1.5]}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": -1}, "dimensions"),
        ({"input": "a", "dimensions": 9999}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ([], None),
    ],
)
def test_param_is_the_named_field(server, body, param):
    content = server.post("/v1/embeddings", body).json()
    assert content["error"]["param"] == param, content


def test_detail_is_a_text_for_voyage_and_a_list_for_infinity(server):
    of_voyage = server.post("/v1/embeddings", {"input": []}).json()
    assert of_voyage["detail"] == of_voyage["message"]
    of_jina = server.post("/v1/rerank", {"query": "a", "documents": []}).json()
    assert of_jina["detail"] == of_jina["message"]
    of_infinity = server.post("/embeddings", {"input": []}).json()
    assert [detail["msg"] for detail in of_infinity["detail"]] == [of_infinity["message"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", lambda texts: {"input": texts}),
        ("/v2/embed", lambda texts: {"texts": texts, "input_type": "search_query"}),
        ("/api/embed", lambda texts: {"input": texts}),
        ("/embed_hybrid", lambda texts: {"inputs": texts}),
    ],
)
def test_2048_texts_are_answered_in_parts(server, path, body):
    assert server.post(path, body(["a"] * 2048)).status_code == 200
    answer = server.post(path, body(["a"] * 2049))
    assert answer.status_code == 422
    assert "2049 texts > maximum allowed 2048 (max-split-texts)" in answer.text


def test_a_body_of_another_api_is_larger_than_tei_allows(server):
    texts = ["word " * 800] * 1000
    assert len(json.dumps(texts)) > 4_000_000
    assert server.post("/v1/embeddings", {"input": texts}).status_code == 200
    assert server.post("/embed", {"inputs": texts}).status_code == 413
    answer = server.post("/v1/embeddings", b" " * 32_000_001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "413")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/nothing"])
def test_a_preflight_allows_the_headers_that_it_asks_for(server, tei, path):
    asked = "authorization,content-type,x-stainless-lang"
    headers = {
        "origin": "http://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
    }
    allowed = server.client.options(path, headers=headers).headers
    assert allowed["access-control-allow-headers"] == asked
    of_tei = tei.client.options(path, headers=headers).headers
    assert of_tei["access-control-allow-headers"] == "content-type"
    headers["access-control-request-headers"] = "x" * 2001
    allowed = server.client.options(path, headers=headers).headers
    assert allowed["access-control-allow-headers"] == "content-type"


FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/embed", {"input": "a"}),
        ("/api/embeddings", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/embed_hybrid", {"inputs": "a"}),
    ],
)
def test_a_body_of_any_type_is_read_as_json(server, path, body):
    assert server.post(path, body, headers=FORM).status_code == 200
    assert server.post(path, body, headers={}).status_code == 200


def test_routes_of_documents_take_json_alone():
    roles = {"search", "write", "manage"}
    assert not [route for route in ROUTES if route.role in roles and route.any_type]
    assert not [route for route in ROUTES if route.role in roles and route.is_peer]


def test_a_classifier_lists_no_rerank(classifier):
    (model,) = classifier.get("/v1/models").json()["data"]
    assert model["capabilities"] == ["classify"]
    assert model["owned_by"] == "infinity"


def test_one_model_by_its_name(server):
    models = server.get("/v1/models").json()["data"]
    model = models[0]
    assert [other["id"] for other in models[1:]] == [
        f"{model['id']}:query",
        f"{model['id']}:document",
    ]
    for listed in models:
        assert server.get(f"/v1/models/{listed['id']}").json() == listed
    assert server.get(f"/v1/models/{model['id']}:latest").json() == model
    assert server.get("/v1/models/other/name").status_code == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//embed", "/embed"),
        ("/v1/rerank/", "/v1/rerank"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("//v1//embeddings", "/v1/embeddings"),
        ("/v1/api/embed", "/api/embed"),
        ("/api/v1/embeddings", "/v1/embeddings"),
        ("/openai/deployments/m/embeddings", "/embeddings"),
        ("/m/small/openai/v1/embeddings", "/m/small/v1/embeddings"),
        ("/V1/Embeddings", "/v1/embeddings"),
        ("/m/small/v1/v1/rerank", "/m/small/v1/rerank"),
    ],
)
def test_a_404_names_the_path_that_was_meant(server, path, meant):
    answer = server.client.post(f"{server.url}{path}", json={})
    assert answer.status_code == 404
    assert f"there is no path {path}; {meant} exists" in answer.text


def test_the_rest_of_ollama(server):
    running = server.get("/api/ps").json()["models"]
    for model in running:
        assert datetime.fromisoformat(model.pop("expires_at")) > datetime.now(UTC)
        assert model.pop("context_length") == server.get("/info").json()["max_input_length"]
    assert running == server.get("/api/tags").json()["models"]
    assert server.post("/api/pull", {"model": "small"}).json() == {"status": "success"}


def test_a_null_hides_no_duplicate_field(server):
    for body in (b'{"input": "a", "input": "b"}', b'{"input": "a", "user": null, "input": "b"}'):
        answer = server.post("/v1/embeddings", body)
        assert (answer.status_code, "duplicate field `input`" in answer.text) == (422, True)


def test_nulls_of_nested_objects_and_values_of_documents(server):
    budget = {"inputs": "a", "multivector": {"max_tokens": 4, "dtype": None}}
    assert server.post("/embed_multivector", budget).status_code == 200
    document = {"text": "a", "page": None}
    body = {"query": "a", "documents": [document], "top_n": None, "truncation_direction": None}
    for path in ("/rerank", "/v1/rerank"):
        answer = server.post(path, body | {"return_documents": True})
        assert answer.json()["results"][0]["document"] == document, answer.text


@pytest.mark.parametrize(
    "text",
    [
        rb"\\ud83d",
        rb"\\\\ud83d",
        rb"\ud83d\ude00",
        rb"\ud83d\ude00\ude00",
        rb"\ud83d\ud83d\ude00",
        rb"a\\\ud83d",
        rb"\n\ud83d\t",
    ],
)
def test_only_halves_of_pairs_are_replaced(server, text):
    expected = json.loads(b'"' + text + b'"').encode("utf-16", "surrogatepass")
    body = b'{"documents": ["' + text + b'"], "query": "a", "return_documents": true}'
    answer = server.post("/rerank", body)
    assert answer.status_code == 200, answer.text
    document = answer.json()["results"][0]["document"]["text"]
    assert document == expected.decode("utf-16", "replace")


def test_rerank_of_documents_is_of_another_api(server):
    documents = ["word " * 800] * 1000
    body = {"query": "a", "documents": documents, "return_documents": False}
    assert server.post("/rerank", body, headers=FORM).status_code == 200
    texts = {"query": "a", "texts": ["b"]}
    assert server.post("/rerank", texts, headers=FORM).status_code == 415
    texts = {"query": "a", "texts": documents[:30] * 30}
    assert server.post("/rerank", texts).status_code == 413


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_are_bounded(dense_server, path):
    texts = [f"{number}" for number in range(2048)]
    others = [f"other {number}" for number in range(2048)]
    assert dense_server.post(path, {"text_1": texts, "text_2": others}).status_code == 200
    answer = dense_server.post(path, {"text_1": "a", "text_2": [*texts, "b"]})
    assert (answer.status_code, "max-split-texts" in answer.text) == (422, True)


LONG = "one " * 1000


@pytest.mark.parametrize("tokens", [-1, 1, 5, 10_000])
def test_vllms_length_of_inputs(server, tokens):
    body = {"input": LONG, "truncation": False, "truncate_prompt_tokens": tokens}
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    longest = server.get("/info").json()["max_input_length"]
    expected = longest if tokens < 0 else min(tokens, longest)
    assert answer.json()["usage"]["prompt_tokens"] == expected
    ranked = {"query": "a", "documents": [LONG], "truncate_prompt_tokens": tokens}
    assert server.post("/v1/rerank", ranked).status_code == 200
    scored = {"text_1": "a", "text_2": LONG, "truncate_prompt_tokens": tokens}
    assert server.post("/score", scored).status_code == 200


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_relevance_lies_within_0_and_1(server, path):
    body = {"query": "one two", "documents": ["one two", "three", "one", "four five six"]}
    results = server.post(path, body).json()["results"]
    raw = server.post(path, body | {"raw_scores": True}).json()["results"]
    assert [result["index"] for result in results] == [result["index"] for result in raw]
    for result, similarity in zip(results, raw, strict=True):
        distance = similarity["relevance_score"] - 0.5
        expected = 0.5 + 2 * distance / (1 + 4 * abs(distance))
        assert result["relevance_score"] == pytest.approx(expected, abs=1e-6)
        assert 0 <= result["relevance_score"] <= 1
    of_tei = server.post("/rerank", {"query": "one two", "texts": body["documents"]}).json()
    assert [result["score"] for result in of_tei] == [result["relevance_score"] for result in raw]


def test_teis_face_beside_the_other_routes():
    """As `text-embeddings-router` serves."""
    with serving(server={"tei_face": True}) as running:
        assert running.post("/v1/embeddings", {"input": ["a"] * 33}).status_code == 422
        refused = running.post("/v1/embeddings", {"input": []}).json()
        assert set(refused) == {"message", "code", "type"}
        assert running.post("/rerank", {"query": "a", "documents": ["b"]}).status_code == 422
        assert running.post("/v1/rerank", {"query": "a", "documents": ["b"]}).status_code == 200
        assert running.post("/embed_hybrid", {"inputs": "a"}).status_code == 200
        assert running.get("/", headers={"accept": "text/html"}).content == b""
        assert running.get("/nothing").content == b""
