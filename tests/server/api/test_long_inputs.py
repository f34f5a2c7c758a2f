"""`long_inputs`: a text longer than the model is averaged instead of cut, where a request or the
server says so."""

import numpy as np
import pytest

from tests.server.grpc.live import rpc_serving

TEXT = "one two, three four; search engine five: "
LONG = TEXT * 20
SHORT = "two three"
HEADER = "x-hybridtei-truncated"


def dense(running, text, path="/v1/embeddings", **fields):
    answer = running.post(path, {"input": text, **fields})
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def test_the_field_reads_all_of_a_text_and_leaves_short_ones(server):
    cut, short = dense(server, [LONG, SHORT])
    answer = server.post("/v1/embeddings", {"input": [LONG, SHORT], "long_inputs": "mean"})
    mean = [item["embedding"] for item in answer.json()["data"]]
    assert mean[1] == short
    assert mean[0] != cut
    assert np.linalg.norm(mean[0]) == pytest.approx(1, abs=1e-6)
    assert HEADER not in answer.headers
    assert "truncated" not in answer.json()["usage"]
    assert dense(server, [LONG, SHORT], long_inputs="cut") == [cut, short]
    body = {"inputs": [LONG, SHORT], "long_inputs": "mean"}
    hybrid = server.post("/embed_hybrid", body).json()
    np.testing.assert_allclose(hybrid[0]["dense"], mean[0], atol=1e-6)
    rows = server.post("/embed_multivector", body).json()
    assert rows == [item["multivector"] for item in hybrid]
    assert len(rows[0]) > 64
    budget = {"multivector": {"max_tokens": 10}, "outputs": ["multivector"]}
    merged = server.post("/embed_hybrid", {**body, **budget}).json()
    assert len(merged[0]["multivector"]) == 10


def test_refusals_name_the_field(server):
    answer = server.post("/v1/embeddings", {"input": "a", "long_inputs": "sum"})
    assert (answer.status_code, "long_inputs" in answer.text) == (422, True)
    body = {"input": [SHORT, LONG], "long_inputs": "mean", "truncation": False}
    answer = server.post("/v1/embeddings", body)
    assert (answer.status_code, "input[1]" in answer.text) == (422, True)


def test_spans_and_chunks_are_read_in_windows_of_their_own(server):
    for path, body in (
        ("/embed_hybrid", {"inputs": {"text": LONG, "spans": [[0, 3], [400, 420]]}}),
        ("/v1/embeddings", {"input": [TEXT] * 20, "late_chunking": True}),
    ):
        answer = server.post(path, {"long_inputs": "mean", **body})
        assert answer.status_code == 200, answer.text
        assert answer.content == server.post(path, body).content


def test_the_flag_is_the_default_of_all_embedding_routes(server):
    (mean,) = dense(server, LONG, long_inputs="mean")
    requests = [
        ("/embed", {"inputs": LONG}, lambda body: body[0]),
        ("/v2/embed", {"texts": [LONG]}, lambda body: body["embeddings"]["float"][0]),
        ("/api/embed", {"input": LONG}, lambda body: body["embeddings"][0]),
        ("/embed_hybrid", {"inputs": LONG}, lambda body: body[0]["dense"]),
        ("/v1/embeddings", {"input": LONG}, lambda body: body["data"][0]["embedding"]),
    ]
    with rpc_serving(server={"long_inputs": "mean"}) as rpc:
        running = rpc.running
        for path, body, vector in requests:
            answer = running.post(path, body)
            np.testing.assert_allclose(vector(answer.json()), mean, atol=1e-6)
            assert HEADER not in answer.headers
        embedded = rpc.ask("Embed", {"inputs": LONG, "truncate": True})
        np.testing.assert_allclose(embedded.embeddings, mean, atol=1e-6)
        assert running.get("/info").json()["hybridtei"]["long_inputs"] == "mean"
        cut = running.post("/embed_hybrid", {"inputs": LONG, "long_inputs": "cut"})
        assert cut.headers[HEADER] == "1"
        # What a single pass reads is cut as before
        assert running.post("/embed_all", {"inputs": LONG}).headers[HEADER] == "1"
        refused = running.post("/embed", {"inputs": LONG, "truncate": False})
        assert (refused.status_code, "less than 64 tokens" in refused.text) == (422, True)
        body = {"input": LONG, "truncate_prompt_tokens": 5}
        assert running.post("/v1/embeddings", body).json()["usage"]["total_tokens"] == 5
        assert (
            running.post("/embed", {"inputs": SHORT}).json()
            == server.post("/embed", {"inputs": SHORT}).json()
        )
