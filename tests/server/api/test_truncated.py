"""Texts that were cut are told: a header on every route, places and characters in `usage` where
there is one, and a counter."""

import numpy as np
import openai
import pytest

from tests.server.live import serving

HEADER = "x-hybridtei-truncated"
LONG = "one two, three four; ünïcode five: " * 40
SHORT = "two three"


def truncated(answer):
    return [(cut["index"], cut["characters"]) for cut in answer["usage"].get("truncated", [])]


@pytest.mark.parametrize(
    ("path", "body", "cuts"),
    [
        ("/embed", {"inputs": [SHORT, LONG, LONG], "truncate": True}, 2),
        ("/embed_all", {"inputs": LONG, "truncate": True}, 1),
        ("/embed_sparse", {"inputs": [LONG], "truncate": True}, 1),
        ("/embed_hybrid", {"inputs": [LONG, SHORT], "truncate": True}, 1),
        ("/api/embed", {"input": [SHORT, LONG]}, 1),
        ("/api/embeddings", {"prompt": LONG}, 1),
        ("/v2/embed", {"texts": [LONG, SHORT, LONG]}, 2),
        ("/v1/embeddings", {"input": [LONG, SHORT]}, 1),
        (
            "/similarity",
            {
                "inputs": {"source_sentence": LONG, "sentences": [SHORT]},
                "parameters": {"truncate": True},
            },
            1,
        ),
        ("/v1/rerank", {"query": "one", "documents": [SHORT, LONG]}, 1),
        ("/score", {"text_1": "one", "text_2": [SHORT, LONG, LONG]}, 2),
    ],
)
def test_a_header_counts_them(server, path, body, cuts):
    answer = server.post(path, body)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, str(cuts)), answer.text
    assert HEADER not in server.post("/embed", {"inputs": SHORT}).headers


@pytest.mark.parametrize("path", ["/predict", "/v1/classify", "/classify"])
def test_a_classifier_tells_them_too(classifier, path):
    body = (
        {"inputs": [[SHORT], [LONG]], "truncate": True}
        if path == "/predict"
        else {"input": [SHORT, LONG]}
    )
    answer = classifier.post(path, body)
    assert answer.headers[HEADER] == "1"
    if path != "/predict":
        ((index, (begin, end)),) = truncated(answer.json())
        assert (index, begin) == (1, 0)
        assert 100 < end < len(LONG)


@pytest.mark.parametrize("side", [None, "query"])
@pytest.mark.parametrize("width", [1, 300])
def test_the_kept_characters_make_the_same_vector(server, side, width):
    """`width`: of the blanks between words, so that the bound of characters cuts first."""
    text = LONG.replace(" ", " " * width)
    assert len(text) > 64 * 250 or width == 1
    body = {"input": [SHORT, text], "input_type": side, "truncation": True}
    answer = server.post("/v1/embeddings", body).json()
    ((index, (begin, end)),) = truncated(answer)
    assert (index, begin) == (1, 0)
    kept = server.post("/v1/embeddings", {"input": text[begin:end], "input_type": side})
    assert HEADER not in kept.headers
    np.testing.assert_allclose(
        kept.json()["data"][0]["embedding"], answer["data"][1]["embedding"], atol=1e-6
    )
    more = text[begin : end + width + 1].rstrip() + " two"
    assert HEADER in server.post("/v1/embeddings", {"input": more, "input_type": side}).headers


def test_the_end_is_kept_if_the_beginning_is_cut(server, reranker):
    body = {
        "query": "two",
        "documents": [SHORT, LONG],
        "truncation_direction": "Left",
        "raw_scores": True,
    }
    for running in (server, reranker):
        answer = running.post("/v1/rerank", body).json()
        ((index, (begin, end)),) = truncated(answer)
        assert (index, end) == (1, len(LONG.rstrip()))
        if running is server:
            # Its prompt is cut off first
            continue
        again = running.post("/v1/rerank", {**body, "documents": [LONG[begin:]]}).json()
        scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
        assert again["results"][0]["relevance_score"] == pytest.approx(scores[1], abs=1e-6)
        assert truncated(again) == []


def test_blanks_that_are_cut_off_are_told(server):
    text = "one" + " " * 20_000 + "two"
    answer = server.post("/v1/embeddings", {"input": text, "truncation": True}).json()
    assert truncated(answer) == [(0, [0, 3])]


def test_ids_have_no_characters(server):
    ids = [2, *[20] * 100, 3]
    answer = server.post("/v1/embeddings", {"input": [ids], "truncation": True}).json()
    assert truncated(answer) == [(0, None)]


def test_places_are_those_of_the_request_in_every_chunk(server, reranker):
    texts = [LONG if place in (3, 70, 149) else f"{SHORT} {place}" for place in range(150)]
    client = openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="-",
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    raw = client.embeddings.with_raw_response.create(
        model="any", input=texts, encoding_format="float"
    )
    assert raw.headers[HEADER] == "3"
    assert [cut["index"] for cut in raw.parse().usage.truncated] == [3, 70, 149]
    for running in (server, reranker):
        answer = running.post("/v1/rerank", {"query": "one", "documents": texts}).json()
        assert [index for index, _ in truncated(answer)] == [3, 70, 149]


def test_a_counter_counts_them_and_tei_tells_them_by_the_header_alone():
    counter = "\nhybridtei_truncated_inputs_total "
    with serving(server={"only_tei_routes": True}) as tei:
        assert counter not in tei.get("/metrics").text
        answer = tei.post("/v1/embeddings", {"input": [LONG, LONG]})
        assert answer.headers[HEADER] == "2"
        assert set(answer.json()["usage"]) == {"prompt_tokens", "total_tokens"}
        assert f"{counter}2\n" in tei.get("/metrics").text
