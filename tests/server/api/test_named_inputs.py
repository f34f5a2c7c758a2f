"""An error that concerns one of many inputs names it, on every route that is not TEI's."""

from contextlib import ExitStack

import pytest

from tests.inference.engine import small
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import serving

LONG = "one " * 1000
GOOD = ["one"] * 20
SPECS = {
    "every output": small.model_spec,
    "dense": small.dense_only,
    "splade": small.splade,
    "reranker": lambda: labelled("LABEL_0"),
    "classifier": lambda: labelled(*LABELS),
    "tagger": lambda: labelled(*TAGS, tags=True),
}


@pytest.fixture(scope="module")
def servers():
    """A server of each kind, which refuses long inputs."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(serving(spec(), engine={"auto_truncate": False}))
            for name, spec in SPECS.items()
        }


def hooked(*texts, **options):
    return [{"data": text, "model": "small", "options": options or None} for text in texts]


def spanned(*texts):
    return [{"text": text, "spans": [[0, 3]]} for text in texts]


def content(*texts):
    return [{"content": [{"type": "text", "text": text}]} for text in texts]


# Each row once with a text that is too long and, unless the route takes it, with an empty one
EMBED = [
    ("/v1/embeddings", lambda text: {"input": [*GOOD, text]}, "input[20]"),
    ("/embeddings", lambda text: {"input": [*GOOD, text]}, "input[20]"),
    ("/v1/contextualizedembeddings", lambda text: {"inputs": [["one"], [text]]}, "inputs[1]"),
    ("/v1/embed", lambda text: {"texts": [*GOOD, text], "truncate": "NONE"}, "texts[20]"),
    ("/v2/embed", lambda text: {"texts": [*GOOD, text], "truncate": "NONE"}, "texts[20]"),
    ("/v2/embed", lambda text: {"inputs": content(*GOOD, text), "truncate": "NONE"}, "inputs[20]"),
    ("/api/embed", lambda text: {"input": [*GOOD, text], "truncate": False}, "input[20]"),
    ("/embed_hybrid", lambda text: {"inputs": [*GOOD, text]}, "inputs[20]"),
    ("/embed_hybrid", lambda text: {"inputs": spanned(*GOOD, text)}, "inputs[20]"),
    ("/embed_multivector", lambda text: {"inputs": [*GOOD, text]}, "inputs[20]"),
    ("/qdrant/inference", lambda text: {"inputs": hooked(*GOOD, text)}, "inputs[20].data"),
]
SCORE = [
    ("/score", lambda text: {"text_1": "one", "text_2": [*GOOD, text]}, "text_2[20]"),
    ("/score", lambda text: {"text_1": [*GOOD, text], "text_2": [*GOOD, "a"]}, "text_1[20]"),
    (
        "/v1/score",
        lambda text: {"queries": ["a", "b", text], "documents": ["c", "d", "e"]},
        "queries[2]",
    ),
    (
        "/v1/score",
        lambda text: {"queries": ["a", "b", "c"], "documents": ["c", "d", text]},
        "documents[2]",
    ),
]
LABEL = [
    ("classifier", "/classify", lambda text: {"input": [*GOOD, text]}, "input[20]"),
    ("classifier", "/v1/classify", lambda text: {"input": [*GOOD, text]}, "input[20]"),
    ("tagger", "/predict_tokens", lambda text: {"inputs": [*GOOD, text]}, "inputs[20]"),
    ("tagger", "/predict_tokens", lambda text: {"inputs": [["a", "b"], [text]]}, "inputs[1][0]"),
    ("tagger", "/predict_tokens", lambda text: {"inputs": ["a", ["b", text]]}, "inputs[1][1]"),
]
EVERY_TEXT = [
    *(("every output", *row) for row in EMBED),
    *(("dense", *row) for row in SCORE),
    *(("splade", *row) for row in SCORE),
    *LABEL,
]
LONG_TEXT = [
    *EVERY_TEXT,
    *(("every output", *row) for row in SCORE),
    ("reranker", *SCORE[0]),
    ("reranker", *SCORE[3]),
    ("every output", "/v1/rerank", lambda text: {"query": text, "documents": GOOD}, "query"),
    *(
        (model, path, lambda text: {"query": "a", "documents": [*GOOD * 4, text]}, "documents[80]")
        for model in ("every output", "reranker")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    (
        "every output",
        "/v1/embeddings",
        lambda text: {"input": [*GOOD, text], "late_chunking": True},
        "input",
    ),
]


@pytest.mark.parametrize(("model", "path", "body", "name"), LONG_TEXT)
def test_a_text_that_is_too_long(servers, model, path, body, name):
    answer = servers[model].post(path, body(LONG))
    assert answer.status_code in (400, 422)
    assert f"`{name}` must have less than {small.LONGEST} tokens" in answer.text


@pytest.mark.parametrize(("model", "path", "body", "name"), EVERY_TEXT)
def test_an_empty_text(servers, model, path, body, name):
    answer = servers[model].post(path, body(""))
    assert answer.status_code == 400
    assert f"`{name}` cannot be empty" in answer.text


@pytest.mark.parametrize("model", ["every output", "dense"])
def test_a_prompt_of_one_input(servers, model):
    inputs = [*hooked(*GOOD), *hooked("one", prompt_name="nonsense")]
    answer = servers[model].post("/qdrant/inference", {"inputs": inputs})
    assert answer.status_code == 400
    assert "`inputs[20].options.prompt_name` is no prompt of small" in answer.json()["error"]


def test_inputs_of_several_passes_are_named_by_their_place_in_the_request(servers):
    models = ["small/sparse", "small", "small/multivector", "small/dense"]
    inputs = [{"data": f"one {i}", "model": models[i % 4]} for i in range(20)]
    for place in range(0, 20, 3):
        wrong = [*inputs]
        wrong[place] = wrong[place] | {"data": LONG}
        answer = servers["every output"].post("/qdrant/inference", {"inputs": wrong})
        assert f"`inputs[{place}].data` must have less" in answer.json()["error"]
