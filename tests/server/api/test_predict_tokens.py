"""`/predict_tokens`, and entities at the root of a tagger."""

import pytest

from tests.server.conftest import TAGS

TEXT = "One two, Zürich"


def tokens(running, inputs, **more):
    response = running.post("/predict_tokens", {"inputs": inputs, **more})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_token_is_a_slice_of_the_text_with_its_best_label(tagger):
    (found,) = tokens(tagger, [[TEXT]])
    assert [list(item) for item in found] == [
        ["token", "token_id", "start", "end", "results"]
    ] * len(found)
    for item in found:
        assert item["token"] == TEXT[item["start"] : item["end"]]
        ((label, score),) = item["results"].items()
        assert label in TAGS
        assert 0 < score <= 1
    assert "".join(item["token"] for item in found) == TEXT.replace(" ", "")
    assert found[0]["token"] == "One"


def test_raw_scores_are_the_logits_of_all_labels(tagger):
    (plain,), (raw,) = tokens(tagger, [[TEXT]]), tokens(tagger, [[TEXT]], raw_scores=True)
    for one, other in zip(plain, raw, strict=True):
        assert list(other["results"]) == list(TAGS)
        assert max(other["results"], key=other["results"].get) == next(iter(one["results"]))


def test_special_tokens_on_request(tagger):
    (plain,), (whole,) = (
        tokens(tagger, [[TEXT]]),
        tokens(tagger, [[TEXT]], include_special_tokens=True),
    )
    assert whole[1:-1] == plain
    assert [(whole[i]["token"], whole[i]["start"], whole[i]["end"]) for i in (0, -1)] == [
        ("[CLS]", 0, 0),
        ("[SEP]", 0, 0),
    ]


def test_one_list_a_text_however_they_are_given(tagger):
    one, two = tokens(tagger, [["one two"], ["three"]])
    assert tokens(tagger, ["one two", "three"]) == [one, two]
    assert tokens(tagger, [["one two", "three"]]) == [[*one, *two]]
    assert tokens(tagger, "one two") == [one]
    assert tokens(tagger, [["one two"], []]) == [one, []]


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_entities_have_no_id_and_no_prefix(tagger, strategy):
    (found,) = tokens(tagger, [[TEXT]], aggregation_strategy=strategy)
    for item in found:
        assert item["token_id"] == 0
        assert item["token"] == TEXT[item["start"] : item["end"]]
        assert set(item["results"]) <= {"PER", "LOC"}
    entities = tagger.post(
        "/", {"inputs": TEXT, "parameters": {"aggregation_strategy": strategy}}
    ).json()
    assert [
        (e["word"], e["start"], e["end"], {e["entity_group"]: e["score"]}) for e in entities
    ] == [(item["token"], item["start"], item["end"], item["results"]) for item in found]


def test_hugging_faces_defaults(tagger):
    simple = tagger.post(
        "/", {"inputs": TEXT, "parameters": {"aggregation_strategy": "simple"}}
    ).json()
    assert tagger.post("/", {"inputs": TEXT}).json() == simple
    assert tagger.post("/", {"inputs": [TEXT]}).json() == [simple]
    each = tagger.post(
        "/", {"inputs": TEXT, "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    ).json()
    assert len(each) == len(tokens(tagger, TEXT)[0])
    assert set(each[0]) == {"entity", "score", "word", "start", "end"}
    other = tagger.post(
        "/", {"inputs": TEXT, "parameters": {"ignore_labels": ["PER", "PER"]}}
    ).json()
    assert other == [item for item in simple if item["entity_group"] != "PER"]
    refused = tagger.post("/", {"inputs": TEXT, "parameters": {"aggregation_strategy": "best"}})
    assert refused.status_code == 422
    assert "parameters.aggregation_strategy: " in refused.text


@pytest.mark.parametrize(
    ("inputs", "status", "error"),
    [
        ([], 400, "`inputs` cannot be empty"),
        ([[]], 400, "`inputs` cannot be empty"),
        (
            ["x"] * 2049,
            422,
            "the request holds 2049 texts > maximum allowed 2048 (max-split-texts)",
        ),
    ],
)
def test_refusals(tagger, inputs, status, error):
    response = tagger.post("/predict_tokens", {"inputs": inputs})
    assert (response.status_code, response.json()["error"]) == (status, error)


def test_other_models_and_other_shapes(server, tagger):
    response = server.post("/predict_tokens", {"inputs": [["one"]]})
    assert (response.status_code, response.json()["error"]) == (
        424,
        "Backend error: Model is not a token classification model",
    )
    assert (
        tagger.post(
            "/predict_tokens", {"inputs": [["one"]], "aggregation_strategy": "best"}
        ).status_code
        == 422
    )
    assert tagger.post("/predict_tokens", {"inputs": 1}).status_code == 422
    assert tagger.get("/info").json()["hybridtei"]["role"] == "tagger"


def test_the_texts_of_a_list_are_bounded(tagger):
    for count, status in ((32, 200), (33, 422)):
        assert tagger.post("/", {"inputs": ["one"] * count}).status_code == status
