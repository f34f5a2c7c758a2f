"""Ollama's routes, by hand and by its own client."""

import pytest


def test_a_list_of_vectors_even_for_one_text(server):
    whole = server.post(
        "/api/embed",
        {"model": "any", "input": ["one", "two three"], "truncate": True, "keep_alive": "5m"},
    ).json()
    assert whole["embeddings"] == server.post("/embed", {"inputs": ["one", "two three"]}).json()
    assert (whole["model"], whole["prompt_eval_count"], whole["load_duration"]) == ("small", 7, 0)
    assert whole["total_duration"] > 0
    one = server.post(
        "/api/embed", {"model": "any", "input": "one", "dimensions": 4, "options": {"num_ctx": 9}}
    ).json()
    assert one["embeddings"] == server.post("/embed", {"inputs": ["one"], "dimensions": 4}).json()


def test_what_is_too_long_is_cut_unless_told_otherwise(server):
    text = "one " * 1000
    cut = server.post("/api/embed", {"input": text}).json()["embeddings"]
    assert cut == server.post("/embed", {"inputs": [text], "truncate": True}).json()
    refused = server.post("/api/embed", {"input": text, "truncate": False})
    assert refused.status_code == 422
    assert "must have less than" in refused.json()["error"]


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": ""}])
def test_no_input_loads_the_model(server, body):
    response = server.post("/api/embed", {"model": "small", **body})
    assert (response.status_code, response.json()["embeddings"]) == (200, [])


def test_splade_is_refused(splade_server):
    response = splade_server.post("/api/embed", {"input": "one"})
    assert (response.status_code, response.json()["error_type"]) == (424, "Backend")


def test_the_older_route_gives_one_vector_as_the_model_makes_it(server):
    body = {"model": "any", "prompt": "two three", "options": {"num_ctx": 9}}
    whole = server.post("/api/embeddings", body).json()
    assert whole == {
        "embedding": server.post("/embed", {"inputs": "two three", "normalize": False}).json()[0]
    }
    assert server.post("/api/embeddings", {"model": "any", "prompt": ""}).json() == {
        "embedding": []
    }
