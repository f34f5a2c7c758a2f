"""`/predict` and its kin: forms of `inputs`, shapes, and who else asks for labels."""

import numpy as np
import pytest

from hybridtei.server.api import tei
from tests.server.conftest import LABELS, labelled
from tests.server.live import serving

TOLERANCE = 1e-6


def prediction(running, inputs, **more):
    response = running.post("/predict", {"inputs": inputs, **more})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("which", "body", "status", "error"),
    [
        ("tagger", {"inputs": "one"}, 424, "Backend error: Model is not a classifier model"),
        (
            "classifier",
            {"inputs": "one", "parameters": {"function_to_apply": "tanh"}},
            422,
            "Input validation error: `function_to_apply` is 'tanh'; known: sigmoid, softmax, none",
        ),
        (
            "classifier",
            {"inputs": "one", "parameters": {"function_to_apply": ["none"]}},
            422,
            "Input validation error: `function_to_apply` is ['none']; known: sigmoid, softmax, none",
        ),
    ],
)
def test_refusals(request, which, body, status, error):
    response = request.getfixturevalue(which).post("/predict", body)
    assert (response.status_code, response.json()["error"]) == (status, error)


def test_parameters_mean_hugging_faces_client(classifier):
    flat = prediction(classifier, "one")
    assert prediction(classifier, "one", parameters={}) == [flat]
    assert prediction(classifier, "one", parameters=None) == flat
    # TEI ignores it
    assert prediction(classifier, "one", parameters=5) == flat
    assert prediction(classifier, "one", parameters={"top_k": 2}) == [flat[:2]]
    raw = prediction(classifier, "one", raw_scores=True)
    assert prediction(classifier, "one", parameters={"function_to_apply": "none"}) == [raw]
    assert prediction(classifier, "one", parameters={"function_to_apply": "softmax"}) == [flat]
    (by_itself,) = prediction(classifier, "one", parameters={"function_to_apply": "sigmoid"})
    np.testing.assert_allclose(
        [item["score"] for item in by_itself],
        [1 / (1 + np.exp(-item["score"])) for item in raw],
        atol=TOLERANCE,
    )
    assert classifier.post("/", {"inputs": "one", "parameters": {}}).json() == [flat]
    assert (
        classifier.post("/predict", {"inputs": "one", "parameters": {"top_k": 0}}).status_code
        == 422
    )


def test_the_root_fits_the_model(classifier, reranker, server):
    assert classifier.post("/", {"inputs": [["one"], ["two"]]}).json() == prediction(
        classifier, [["one"], ["two"]]
    )
    asked = {"query": "one", "texts": ["two", "three"]}
    ranks = reranker.post("/rerank", asked).json()
    for path in ("/", "/invocations"):
        assert reranker.post(path, asked).json() == ranks
        assert reranker.post(path, {"inputs": asked}).json() == ranks
        assert (
            reranker.post(path, {"query": "one", "documents": ["two"]}).json()["object"] == "rerank"
        )
        assert server.post(path, asked).json() == server.post("/rerank", asked).json()
    assert "missing field `query`" in reranker.post("/", {"inputs": "one"}).text
    assert reranker.post("/vertex", {"instances": [asked, {"inputs": "one"}]}).json() == {
        "predictions": [ranks, prediction(reranker, "one")]
    }


def test_infinity_and_vllm_are_answered_as_they_expect(classifier):
    texts = ["one", "two three"]
    plain = prediction(classifier, [[text] for text in texts])
    answer = classifier.post(
        "/classify", {"input": texts, "model": "any", "raw_scores": False}
    ).json()
    assert (answer["object"], answer["data"], answer["model"]) == ("classify", plain, "small")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    answer = classifier.post("/v1/classify", {"input": texts}).json()
    assert answer["object"] == "list"
    for place, (item, wanted) in enumerate(zip(answer["data"], plain, strict=True)):
        scores = {one["label"]: one["score"] for one in wanted}
        probabilities = [scores[label] for label in LABELS]
        assert item == {
            "index": place,
            "label": wanted[0]["label"],
            "probs": probabilities,
            "num_classes": 3,
        }
    raw = classifier.post("/v1/classify", {"input": "one", "use_activation": False}).json()["data"][
        0
    ]["probs"]
    assert sorted(raw) == sorted(
        one["score"] for one in prediction(classifier, "one", raw_scores=True)
    )
    with serving(labelled(*LABELS), server={"classify_as": "vllm"}) as running:
        assert running.post("/classify", {"input": texts}).json()["data"] == answer["data"]


def test_what_classify_refuses(classifier, server):
    assert classifier.post("/classify", {"input": []}).status_code == 400
    assert server.post("/v1/classify", {"input": "one"}).status_code == 424
    assert classifier.post("/classify", {"input": ["x"] * 2049}).status_code == 422


def test_scores_of_pairs(reranker, dense_server, server, classifier):
    def scores(running, one, other, **more):
        answer = running.post("/score", {"text_1": one, "text_2": other, **more}).json()
        assert [item["index"] for item in answer["data"]] == [*range(len(answer["data"]))]
        assert {item["object"] for item in answer["data"]} == {"score"}
        return [item["score"] for item in answer["data"]]

    texts = ["two", "three four"]
    for running in (reranker, server):
        ranks = {
            i["index"]: i["score"]
            for i in running.post("/rerank", {"query": "one", "texts": texts}).json()
        }
        wanted = pytest.approx([ranks[0], ranks[1]], abs=TOLERANCE)
        assert scores(running, "one", texts) == wanted
        assert scores(running, "one", "two") == pytest.approx([ranks[0]], abs=TOLERANCE)
        assert scores(running, ["one", "one"], texts) == wanted
        assert len(scores(running, ["five", "one", "five"], ["two", *texts])) == 3
    near = dense_server.post(
        "/similarity", {"inputs": {"source_sentence": "one", "sentences": texts}}
    ).json()
    np.testing.assert_allclose(scores(dense_server, "one", texts), near, atol=TOLERANCE)
    np.testing.assert_allclose(
        scores(dense_server, ["one", "two"], ["one", "two"]), 1, atol=TOLERANCE
    )
    assert reranker.post("/v1/score", {"queries": "one", "documents": texts}).status_code == 200
    assert (
        reranker.post("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}).status_code
        == 422
    )
    assert reranker.post("/score", {"text_1": "a"}).status_code == 422
    assert classifier.post("/score", {"text_1": "a", "text_2": "b"}).status_code == 424
    assert reranker.service.admission.free == reranker.service.config.max_concurrent_requests


def test_very_many_pairs_are_refused_for_their_number_before_they_are_looked_at(classifier):
    response = classifier.post("/predict", {"inputs": [["a"]] * (tei.MAX_TEXTS + 1)})
    assert response.status_code == 422
    assert "inputs: expected `array` of length <= 20000" in response.text
