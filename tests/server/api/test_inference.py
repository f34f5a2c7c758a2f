"""The hook by which a Qdrant server embeds."""

import numpy as np
import pytest

from tests.inference.engine import small
from tests.near import near
from tests.retrieval.search.small_search import TEXTS, encoder_of
from tests.server.live import serving

HOOK = "/qdrant/inference"
ALL = ("dense", "sparse", "multivector")
TOLERANCE = 1e-6


def hook(running, inputs, inference="update", **more):
    return running.post(
        HOOK,
        {
            "inputs": [{"data_type": "text", **one} for one in inputs],
            "inference": inference,
            **more,
        },
    )


def of(text, model="small", **options):
    return {"data": text, "model": model, "options": options or None}


def test_each_kind_of_vector_by_the_end_of_the_name(server):
    inputs = [of(TEXTS[2], f"small/{kind}") for kind in ALL]
    before = server.backend.forwards
    answer = hook(server, inputs).json()
    assert server.backend.forwards == before + 1
    dense, sparse, multivector = answer["embeddings"]
    encoder = encoder_of(small.model_spec())
    here = encoder.encode([TEXTS[2]], ALL, input_type="document")
    near(dense, here.dense[0], TOLERANCE)
    near(multivector, here.multivector.row(0), TOLERANCE)
    indices, values = here.sparse.row(0)
    assert sparse["indices"] == indices.tolist()
    near(sparse["values"], values, TOLERANCE)
    tokens = answer["usage"]["models"]
    read = len(server.post("/tokenize", {"inputs": TEXTS[2], "prompt_name": "passage"}).json()[0])
    assert tokens == {
        "small/dense": {"tokens": read},
        "small/sparse": {"tokens": 0},
        "small/multivector": {"tokens": 0},
    }


def test_texts_in_any_order_each_once_and_answers_in_the_order_of_the_inputs(server):
    inputs = [of(text, f"small/{kind}") for kind in ALL for text in (*TEXTS, TEXTS[0])]
    before = server.backend.forwards
    answer = hook(server, inputs).json()["embeddings"]
    assert server.backend.forwards == before + 1
    size = len(TEXTS) + 1
    for place in range(size):
        alone = hook(
            server, [of([*TEXTS, TEXTS[0]][place], f"small/{kind}") for kind in ALL]
        ).json()["embeddings"]
        assert [answer[place], answer[place + size], answer[place + 2 * size]] == alone


def test_a_query_is_read_as_one(server):
    encoder = encoder_of(small.model_spec())
    for inference, side in (("update", "document"), ("search", "query")):
        (dense,) = hook(server, [of("one two")], inference).json()["embeddings"]
        near(dense, encoder.encode(["one two"], input_type=side).dense[0], TOLERANCE)
    told, asked, named = hook(
        server,
        [of("one two", input_type="document"), of("one two"), of("one two", prompt_name="passage")],
        "search",
    ).json()["embeddings"]
    near(told, encoder.encode(["one two"], input_type="document").dense[0], TOLERANCE)
    near(asked, encoder.encode(["one two"], input_type="query").dense[0], TOLERANCE)
    near(named, encoder.encode(["one two"], prompt_name="passage").dense[0], TOLERANCE)


def test_dimensions_cut_what_a_pass_of_all_made(server):
    before = server.backend.forwards
    whole, cut, rows = hook(
        server, [of("one"), of("one", dimensions=4), of("one", "small/multivector", dimensions=3)]
    ).json()["embeddings"]
    assert server.backend.forwards == before + 1
    near(cut, np.array(whole[:4]) / np.linalg.norm(whole[:4]), TOLERANCE)
    assert np.shape(rows)[1] == 3
    near(np.linalg.norm(rows, axis=1), 1, TOLERANCE)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (
            {"data": "one", "data_type": "image", "model": "small"},
            "inputs[1].data_type: got 'image', expected one of `text`",
        ),
        ({"data": {"a": 1}, "model": "small"}, "inputs[1].data: expected `str`"),
        (
            {"data": "one", "model": "small", "options": {"vector": "colbert"}},
            "inputs[1].options.vector: got 'colbert'",
        ),
        (
            {"data": "one", "model": "small", "options": {"dimensions": 17}},
            "`inputs[1].options.dimensions` is 17",
        ),
        (
            {"data": "one", "model": "small/sparse", "options": {"dimensions": 4}},
            "means nothing for sparse",
        ),
        (
            {"data": "one", "model": "small", "options": {"input_type": "both"}},
            "inputs[1].options.input_type: got 'both'",
        ),
    ],
)
def test_what_is_wrong_is_a_400_that_qdrant_can_read(server, one, message):
    response = hook(server, [of("two"), one])
    assert response.status_code == 400
    assert message in response.json()["error"]
    for body in (b"{", b"[]", b'{"inputs": 1}'):
        refused = server.post(HOOK, body)
        assert refused.status_code == 400
        assert set(refused.json()) == {"error"}


def test_a_vector_that_the_model_has_not(dense_server):
    response = hook(dense_server, [of("one", "small/sparse")])
    assert response.status_code == 400
    assert (
        "`inputs[0].model`: small has no sparse output. It has: dense" in response.json()["error"]
    )


@pytest.mark.parametrize(
    "name", ["no-such-model", "small/nonsense", "nobody/sparse", "BAAI/bge-m3", "Small"]
)
@pytest.mark.parametrize("path", [HOOK, f"/m/small{HOOK}"])
def test_a_name_that_is_not_served_is_refused_and_what_is_served_is_told(server, path, name):
    before = server.backend.forwards
    response = server.post(path, {"inputs": [of("one"), of("two", name)]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.startswith("`inputs[1].model`: the model `")
    assert "served are `small`" in error
    assert server.backend.forwards == before


@pytest.mark.parametrize("name", ["", "small", "small/dense", "dense", "default"])
@pytest.mark.parametrize("path", [HOOK, f"/m/small{HOOK}"])
def test_each_way_to_name_the_only_model(server, path, name):
    dense, alike = server.post(
        path, {"inputs": [of("one", name), of("one", "small/dense")]}
    ).json()["embeddings"]
    assert dense == alike


def test_a_splade_model_is_named_without_its_vector(splade_server):
    (sparse,) = hook(splade_server, [of("one two")]).json()["embeddings"]
    assert set(sparse) == {"indices", "values"}


def test_nothing_is_nothing(server):
    assert hook(server, []).json() == {"embeddings": [], "usage": {"models": {}}}


def test_more_texts_than_permits_go_in_parts():
    with serving(engine={"max_concurrent_requests": 4}) as running:
        answer = hook(running, [of(f"one {i}") for i in range(50)])
        assert len(answer.json()["embeddings"]) == 50
        assert running.service.admission.free == 4


def test_a_text_that_is_wanted_very_often_is_bounded_as_an_answer():
    """It is computed once, so that only the answer grows."""
    with serving(engine={"max_answer_bytes": 100_000}) as running:
        answer = hook(running, [of("one two three", "small/multivector")] * 5_000)
        assert answer.status_code == 400
        assert "maximum allowed 100000 (max-answer-bytes)" in answer.json()["error"]
        assert hook(running, [of("one two three", "small/multivector")] * 50).status_code == 200
