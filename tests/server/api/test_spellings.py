"""Bodies as clients of several languages and APIs write them, on routes that TEI lacks."""

import json

import pytest

TEXT = "one two three four five six seven"
EMBED = {"input": TEXT, "model": "any"}
RANK = {"query": "one", "documents": ["two three", TEXT], "return_documents": False}


def rows(answer):
    """The vectors or scores of an answer."""
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


@pytest.mark.parametrize(
    ("path", "body", "field", "value", "meant"),
    [
        ("/v1/embeddings", EMBED, "dimensions", "8", 8),
        ("/v1/embeddings", EMBED, "dimensions", 8.0, 8),
        ("/v1/embeddings", EMBED, "normalized", "false", False),
        ("/v1/embeddings", EMBED, "normalized", 0, False),
        ("/v1/rerank", RANK, "top_n", "1", 1),
        ("/v1/rerank", RANK, "raw_scores", "True", True),
    ],
)
def test_numbers_and_booleans_as_texts(server, path, body, field, value, meant):
    expected = rows(server.post(path, {**body, field: meant}))
    assert rows(server.post(path, {**body, field: value})) == expected


@pytest.mark.parametrize("value", [8.5, "eight", "", True, [8]])
def test_what_is_no_whole_number_is_refused(server, value):
    refused = server.post("/v1/embeddings", {**EMBED, "dimensions": value})
    assert refused.status_code == 422
    assert "dimensions: expected `int | null`" in refused.json()["message"]


def test_texts_of_digits_stay_texts(server):
    texts = ["12", "true", "null"]
    asked = {"input": texts, "dimensions": "8"}
    of_tei = server.post("/embed", {"inputs": texts, "dimensions": 8}).json()
    assert [row["embedding"] for row in rows(server.post("/v1/embeddings", asked))] == of_tei


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank"])
def test_a_body_with_a_byte_order_mark_or_in_utf_16(server, path, encoding):
    body = EMBED if path == "/v1/embeddings" else RANK
    text = json.dumps({**body, "user": "größe"}, ensure_ascii=False)
    answer = server.client.post(
        path, content=text.encode(encoding), headers={"content-type": "application/json"}
    )
    assert rows(answer) == rows(server.post(path, body))


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"\xef\xbb\xbf", b"\xff\xfe\x00"])
def test_a_mark_before_no_json_is_refused(server, content):
    refused = server.client.post(
        "/v1/embeddings", content=content, headers={"content-type": "application/json"}
    )
    assert refused.status_code == 400


def test_nvidias_truncate(server):
    long = {"input": "one two " * 1000}
    right = rows(server.post("/v1/embeddings", {**long, "truncate": True}))
    assert rows(server.post("/v1/embeddings", {**long, "truncate": "END"})) == right
    left = server.post("/embed", {"inputs": long["input"], "truncation_direction": "Left"}).json()
    start = rows(server.post("/v1/embeddings", {**long, "truncate": "START"}))
    assert [row["embedding"] for row in start] == left
    assert server.post("/v1/embeddings", {**long, "truncate": "NONE"}).status_code == 422
    both = {**long, "truncate": "END", "truncation": False}
    assert server.post("/v1/embeddings", both).status_code == 422


def test_vllms_side_that_is_cut(server, reranker):
    cut = {"truncate_prompt_tokens": 5, "truncation_side": "left"}
    shorter = rows(server.post("/v1/embeddings", {**EMBED, "input": "five six seven"}))
    assert rows(server.post("/v1/embeddings", {**EMBED, **cut})) == shorter
    long = {"query": "one", "texts": [TEXT * 500], "truncate": True}
    left = reranker.post("/rerank", {**long, "truncation_direction": "Left"}).json()
    assert left != reranker.post("/rerank", long).json()
    body = {"query": "one", "documents": long["texts"], "truncation_side": "left"}
    ranked = rows(reranker.post("/v1/rerank", {**body, "truncate": True}))
    assert ranked[0]["relevance_score"] == left[0]["score"]
    pair = {"text_1": "one", "text_2": long["texts"], "truncation_side": "left"}
    assert rows(reranker.post("/score", pair))[0]["score"] == left[0]["score"]


@pytest.mark.parametrize("side", ["START", "END"])
def test_coheres_length_of_inputs(server, side):
    body = {"embedding_types": ["float"], "truncate": side}
    found = server.post("/v2/embed", {**body, "texts": [TEXT], "max_tokens": 5}).json()
    words = TEXT.split()
    shorter = {"START": words[-3:], "END": words[:3]}[side]
    expected = server.post("/v2/embed", {**body, "texts": [" ".join(shorter)]}).json()
    assert found["embeddings"] == expected["embeddings"]


@pytest.mark.parametrize("path", ["/reranking", "/v1/reranking"])
def test_llama_cpps_paths(server, path):
    assert rows(server.post(path, RANK)) == rows(server.post("/v1/rerank", RANK))


@pytest.mark.parametrize(
    ("path", "name", "other", "answered"),
    [
        ("/api/embed", "input", "prompt", "embeddings"),
        ("/api/embeddings", "prompt", "input", "embedding"),
    ],
)
def test_ollamas_text_under_the_other_routes_name(server, path, name, other, answered):
    expected = server.post(path, {name: TEXT}).json()[answered]
    assert expected
    assert server.post(path, {other: TEXT}).json()[answered] == expected
    assert server.post(path, {name: TEXT, other: "eight"}).json()[answered] == expected
