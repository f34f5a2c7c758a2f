"""TEI's inference routes: shapes, headers, values that agree with each other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine import small
from tests.server.live import Running, serving

TIMES = {"x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"}
TOLERANCE = 1e-6
PROMPTED = {"inputs": "one", "prompt_name": "query"}


def vectors(response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array(response.json(), dtype=np.float32)


@pytest.mark.parametrize(
    ("inputs", "count", "characters", "tokens"),
    [
        ("one", 1, 3, 3),
        (["one"], 1, 3, 3),
        (["one", "two é"], 2, 8, 7),
        ([2, small.IDS["one"], 3], 1, 3, 3),
        ([[2, small.IDS["one"], 3], [small.IDS["two"]]], 2, 4, 4),
        (["one", [small.IDS["two"]]], 2, 4, 4),
        (" ", 1, 1, 2),
        ("\0", 1, 1, 2),
        ("one " * 100, 1, 400, small.LONGEST),
    ],
)
def test_embed_is_a_list_of_lists_with_headers(server, inputs, count, characters, tokens):
    response = server.post("/embed", {"inputs": inputs})
    assert vectors(response).shape == (count, small.HIDDEN)
    headers = response.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == (str(characters), str(tokens))
    assert all(headers[name].isdecimal() for name in TIMES)


def test_ids_are_the_text_they_stand_for(server):
    by_text, by_ids = (server.post("/embed", {"inputs": inputs}) for inputs in ("one", [2, small.IDS["one"], 3]))
    assert by_text.json() == by_ids.json()


def test_embed_normalises_and_cuts_first(server):
    unit = vectors(server.post("/embed", {"inputs": ["one", "two"]}))
    raw = vectors(server.post("/embed", {"inputs": ["one", "two"], "normalize": False}))
    short = vectors(server.post("/embed", {"inputs": ["one", "two"], "dimensions": 5}))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=TOLERANCE)
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=TOLERANCE)
    np.testing.assert_allclose(short, raw[:, :5] / np.linalg.norm(raw[:, :5], axis=1, keepdims=True), atol=TOLERANCE)
    whole = vectors(server.post("/embed", {"inputs": ["one", "two"], "dimensions": small.HIDDEN}))
    np.testing.assert_array_equal(whole, unit)


@pytest.mark.parametrize(("direction", "kept"), [("Right", "one"), ("right", "one"), ("Left", "two"), ("left", "two")])
def test_the_named_side_is_cut_off(server, direction, kept):
    long = "one " * 100 + "two " * 100
    cut = server.post("/embed", {"inputs": long, "truncate": True, "truncation_direction": direction})
    room = small.LONGEST - 2
    assert cut.json() == server.post("/embed", {"inputs": f"{kept} " * room, "truncate": False}).json()
    assert cut.headers["x-compute-tokens"] == str(small.LONGEST)


def test_a_prompt_stands_directly_before_the_text(server):
    assert server.post("/embed", PROMPTED).json() == server.post("/embed", {"inputs": "query: one"}).json()
    assert server.post("/embed", PROMPTED).headers["x-compute-characters"] == "3"


def test_embed_all_gives_raw_states_of_every_token(server):
    response = server.post("/embed_all", {"inputs": ["one two", "three"]})
    rows = response.json()
    assert [len(row) for row in rows] == [4, 3]
    raw = vectors(server.post("/embed", {"inputs": ["one two", "three"], "normalize": False}))
    for row, mean in zip(rows, raw, strict=True):
        np.testing.assert_allclose(np.mean(row, axis=0), mean, atol=TOLERANCE)
    assert set(response.headers) >= TIMES


def test_sparse_queries_that_are_looked_up(server):
    before = server.backend.forwards
    response = server.post("/embed_sparse", {"inputs": ["one two one", "seven"], "query_encoder": "table"})
    assert server.backend.forwards == before
    assert response.headers["x-query-encoder"] == "table"
    assert [[item["value"] for item in row] for row in response.json()] == [[1.0, 1.0], [1.0]]
    assert "x-query-encoder" not in server.post("/embed_sparse", {"inputs": "one"}).headers
    refused = server.post("/embed_sparse", {"inputs": "", "query_encoder": "table"})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "Empty")


def test_embed_sparse_ascends_without_zeros_and_specials(server):
    response = server.post("/embed_sparse", {"inputs": ["one two one two three", "seven"]})
    assert set(response.headers) >= TIMES
    for row, words in zip(response.json(), ({"one", "two", "three"}, {"seven"}), strict=True):
        indices = [entry["index"] for entry in row]
        assert all(list(entry) == ["index", "value"] and entry["value"] > 0 for entry in row)
        assert indices == sorted(set(indices))
        assert {small.PIECES[i] for i in indices} <= words


def test_similarity_is_the_cosine_of_the_vectors(server):
    body = {"inputs": {"source_sentence": "one", "sentences": ["two", "one", "three four"]}}
    response = server.post("/similarity", body)
    unit = vectors(server.post("/embed", {"inputs": ["one", "two", "one", "three four"]}))
    np.testing.assert_allclose(vectors(response), unit[1:] @ unit[0], atol=TOLERANCE)
    assert response.headers["x-compute-characters"] == "19"
    for parameters in (None, {}, {"truncate": None, "truncation_direction": "left", "prompt_name": None}):
        assert server.post("/similarity", {**body, "parameters": parameters}).json() == response.json()


def test_tokenize_tells_byte_offsets(server):
    response = server.post("/tokenize", {"inputs": "é one"})
    assert not TIMES & set(response.headers)
    assert response.json() == [
        [
            {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": small.IDS["e"], "text": "é", "special": False, "start": 0, "stop": 2},
            {"id": small.IDS["one"], "text": "one", "special": False, "start": 3, "stop": 6},
            {"id": 3, "text": "[SEP]", "special": True, "start": None, "stop": None},
        ]
    ]


def test_tokenize_without_specials_with_prompt_and_never_cut(server):
    (plain,) = server.post("/tokenize", {"inputs": "one", "add_special_tokens": False}).json()
    assert [token["text"] for token in plain] == ["one"]
    (prompted,) = server.post("/tokenize", {**PROMPTED, "add_special_tokens": False}).json()
    assert "".join(token["text"] for token in prompted) == "query:one"
    assert prompted[-1]["start"] == len("query: ")
    assert len(server.post("/tokenize", {"inputs": "one " * 100}).json()[0]) == 102


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"ids": [2, small.IDS["one"], small.IDS["two"], 3]}, ["one two"]),
        ({"ids": [2, small.IDS["one"], 3], "skip_special_tokens": False}, ["[CLS] one [SEP]"]),
        ({"ids": [[small.IDS["one"]], [small.IDS["two"]]]}, ["one", "two"]),
        ({"ids": [small.IDS["one"], 2**32 - 1]}, ["one"]),
    ],
)
def test_decode(server, body, texts):
    response = server.post("/decode", body)
    assert response.json() == texts
    assert not TIMES & set(response.headers)


def test_tokenize_then_decode_is_identity(server):
    tokens = server.post("/tokenize", {"inputs": ["one two", "three"]}).json()
    ids = [[token["id"] for token in row] for row in tokens]
    assert server.post("/decode", {"ids": ids}).json() == ["one two", "three"]


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_the_root_answers_as_the_model_does(server, dense_server, splade_server, path):
    body = {"inputs": "one"}
    for running in (server, dense_server):
        assert running.post(path, body).json() == running.post("/embed", body).json()
    assert splade_server.post(path, body).json() == splade_server.post("/embed_sparse", body).json()
    pair = {"inputs": {"source_sentence": "one", "sentences": ["two"]}}
    assert server.post(path, pair).json() == server.post("/similarity", pair).json()
    assert set(server.post(path, body).headers) >= TIMES


def test_task_makes_the_root_similarity():
    with serving(server={"task": "sentence-similarity"}) as running:
        assert running.post("/", {"inputs": "one"}).status_code == 422
        assert running.post("/", {"inputs": {"source_sentence": "one", "sentences": ["two"]}}).status_code == 200


def test_vertex_answers_each_instance_as_the_root(server):
    instances = [{"inputs": "one"}, {"inputs": ["one", "two"], "dimensions": 3}]
    response = server.post("/vertex", {"instances": instances})
    assert response.json() == {"predictions": [server.post("/", instance).json() for instance in instances]}
    assert not TIMES & set(response.headers)
    assert server.post("/vertex", {"instances": []}).json() == {"predictions": []}


@pytest.mark.parametrize(
    ("instances", "status", "error"),
    [
        ([{}], 422, "missing field `inputs`"),
        ([5], 422, "expected `object`, got `int`"),
        ([{"inputs": "one"}, {"inputs": ""}, {}], 400, "Input validation error: `inputs` cannot be empty"),
        ([{"query": "one", "texts": ["two"]}], 424, "Backend error: model is not a re-ranker model"),
    ],
)
def test_the_first_failing_instance_decides(dense_server, instances, status, error):
    response = dense_server.post("/vertex", {"instances": instances})
    assert (response.status_code, response.json()["error"]) == (status, error)


def test_splade_gives_sparse_and_its_dense_form(splade_server: Running):
    (row,) = splade_server.post("/embed_sparse", {"inputs": "one two"}).json()
    (dense,) = splade_server.post("/embed", {"inputs": "one two", "normalize": False}).json()
    assert len(dense) == len(small.PIECES)
    assert {i: value for i, value in enumerate(dense) if value} == {entry["index"]: entry["value"] for entry in row}
    near = splade_server.post("/similarity", {"inputs": {"source_sentence": "one", "sentences": ["one", "two"]}}).json()
    assert near[0] == pytest.approx(1, abs=TOLERANCE)
    assert near[0] > near[1] > 0


@pytest.mark.parametrize(
    ("which", "path", "body", "error"),
    [
        ("splade_server", "/embed", {"inputs": "one"}, "`normalize` is not available for SPLADE models"),
        ("splade_server", "/embed_all", {"inputs": "one"}, "`embed_all` is not available for SPLADE models"),
        ("dense_server", "/embed_sparse", {"inputs": "one"}, "Model is not an embedding model with SPLADE pooling"),
        ("server", "/predict", {"inputs": "one"}, "Model is not a classifier model"),
        ("dense_server", "/rerank", {"query": "one", "texts": ["two"]}, "model is not a re-ranker model"),
        ("dense_server", "/embed_multivector", {"inputs": "one"}, "Model has no `multivector` output. It has: dense, tokens"),
        (
            "dense_server",
            "/embed_hybrid",
            {"inputs": "one", "outputs": ["sparse", "dense"]},
            "Model has no `sparse` output. It has: dense, tokens",
        ),
        (
            "splade_server",
            "/embed_hybrid",
            {"inputs": "one", "outputs": ["dense"]},
            "Model has no `dense` output. It has: sparse",
        ),
    ],
)
def test_an_output_the_model_lacks(request, which, path, body, error):
    response = request.getfixturevalue(which).post(path, body)
    assert response.status_code == 424
    assert response.json() == {"error": f"Backend error: {error}", "error_type": "Backend"}


def test_the_servers_default_prompt_and_truncation():
    with serving(default_prompt="query: ", engine={"auto_truncate": False}) as running:
        plain = running.post("/embed", {"inputs": "one"})
        assert plain.json() == running.post("/embed", PROMPTED).json()
        assert plain.headers["x-compute-tokens"] == "9"
        assert running.post("/embed", {"inputs": "one " * 100}).status_code == 422
        assert running.post("/embed", {"inputs": "one " * 100, "truncate": True}).status_code == 200
        assert running.post("/v1/embeddings", {"input": "one"}).json()["usage"]["prompt_tokens"] == 9


def test_vertex_takes_as_many_instances_as_a_request_may_hold_inputs(server):
    response = server.post("/vertex", {"instances": [1] * 33})
    assert (response.status_code, response.json()["error"]) == (422, "batch size 33 > maximum allowed batch size 32")


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
def test_the_batch_size_is_looked_at_before_what_splade_cannot_do(splade_server, path):
    assert splade_server.post(path, {"inputs": ["one"] * 32}).status_code == 424
    assert splade_server.post(path, {"inputs": ["one"] * 33}).status_code == 422


def test_ids_under_a_prompt_are_text_again(server):
    with_specials, without = ([2, small.IDS["one"], 3], [small.IDS["one"]])
    answers = [server.post("/embed", {"inputs": ids, "prompt_name": "query"}) for ids in (with_specials, without)]
    text = server.post("/embed", {"inputs": "one", "prompt_name": "query"})
    assert [answer.json() for answer in answers] == [text.json()] * 2
    assert {answer.headers["x-compute-tokens"] for answer in answers} == {text.headers["x-compute-tokens"]}


def test_much_work_beside_the_passes_is_refused_not_queued_for_ever():
    with serving() as running:
        with running.service._beside.inside(running.service._beside.free):
            refused = [running.post("/tokenize", {"inputs": "one"}), running.post("/decode", {"ids": [5]})]
            assert [response.status_code for response in refused] == [429, 429]
            assert running.post("/embed", {"inputs": "one"}).status_code == 200
        assert running.post("/tokenize", {"inputs": "one"}).status_code == 200
