"""A text whose outputs are NaN is an error of its own request, on every route and in every format;
other requests of the same pass get their vectors."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conformance.small.fake_backend import HANG
from tests.inference.engine import small
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import serving

Body = Callable[[str], Mapping[str, Any]]
NAN, CLEAN = "poison", "one two"
PAIR = "three"


def inputs(**more):
    return lambda text: {"inputs": text, **more}


def openai(**more):
    return lambda text: {"input": [text], "model": "small", **more}


def cohere(*types):
    return lambda text: {
        "texts": [text],
        "model": "small",
        "input_type": "search_document",
        "embedding_types": types,
    }


def hybrid(*outputs, **more):
    return lambda text: {"inputs": text, "outputs": outputs, **more}


VECTORS = {
    "dense": ("/embed", inputs()),
    "raw": ("/embed", inputs(normalize=False)),
    "cut": ("/embed", inputs(dimensions=4)),
    "all tokens": ("/embed_all", inputs()),
    "sparse": ("/embed_sparse", inputs()),
    "multivector": ("/embed_multivector", inputs()),
    "hybrid": ("/embed_hybrid", hybrid("dense", "sparse", "multivector")),
    "merged": ("/embed_hybrid", hybrid("multivector", multivector={"max_tokens": 1})),
    "int8": ("/embed_hybrid", hybrid("multivector", multivector={"dtype": "int8"})),
    "bits": ("/embed_hybrid", hybrid("multivector", multivector={"dtype": "binary"})),
    "openai": ("/v1/embeddings", openai()),
    "base64": ("/v1/embeddings", openai(encoding_format="base64")),
    "ollama": ("/api/embed", openai()),
    "cohere ubinary": ("/v2/embed", cohere("ubinary")),
    "cohere binary": ("/v2/embed", cohere("binary", "float")),
    "similarity": (
        "/similarity",
        lambda text: {"inputs": {"source_sentence": PAIR, "sentences": [text]}},
    ),
    "multivector rerank": ("/rerank", lambda text: {"query": PAIR, "texts": [text]}),
}
SCORES = {
    "rerank": ("/rerank", lambda text: {"query": PAIR, "texts": [text]}),
    "raw rerank": ("/rerank", lambda text: {"query": PAIR, "texts": [text], "raw_scores": True}),
    "documents": ("/v2/rerank", lambda text: {"query": PAIR, "documents": [text]}),
    "score": ("/score", lambda text: {"text_1": PAIR, "text_2": [text]}),
}
LABELLED = {
    "predict": ("/predict", inputs()),
    "raw predict": ("/predict", inputs(raw_scores=True)),
}
TAGGED = {"tags": ("/predict_tokens", inputs())}


@pytest.fixture(scope="module")
def embedder():
    with serving(nan_on=small.IDS[NAN]) as running:
        yield running


def both(running, path, body):
    """Ask for a text that is NaN and for a clean one; a pass waits until both have come."""
    alone = running.post(path, body(CLEAN))
    assert alone.status_code == 200, alone.text
    released = threading.Event()
    running.backend.gate = lambda _: released.wait(HANG)
    with ThreadPoolExecutor(2) as pool:
        nan, clean = (pool.submit(running.post, path, body(text)) for text in (NAN, CLEAN))
        released.set()
    running.backend.gate = None
    assert nan.result().status_code == 424, nan.result().text
    assert "NaN" in nan.result().text
    assert clean.result().status_code == 200
    assert "NaN" not in clean.result().text


def test_a_request_of_several_texts_says_which_one_it_is(embedder):
    answer = embedder.post("/embed", {"inputs": [CLEAN, CLEAN + CLEAN, NAN, CLEAN]})
    assert answer.status_code == 424
    assert "text 2, counted from 0, is infinite or NaN" in answer.text


@pytest.mark.parametrize("kind", VECTORS)
def test_a_vector_that_is_not_finite_fails_its_own_request(embedder, kind):
    both(embedder, *VECTORS[kind])


def test_a_score_that_is_nan_fails_its_own_request():
    with serving(labelled("LABEL_0"), nan_on=small.IDS[NAN]) as running:
        for path, body in SCORES.values():
            both(running, path, body)


def test_a_label_or_tag_that_is_nan_fails_its_own_request():
    with serving(labelled(*LABELS), nan_on=small.IDS[NAN]) as running:
        for path, body in LABELLED.values():
            both(running, path, body)
    with serving(labelled(*TAGS, tags=True), nan_on=small.IDS[NAN]) as running:
        for path, body in TAGGED.values():
            both(running, path, body)


def test_splade_weights_that_are_nan_fail_their_own_request():
    with serving(small.splade(), nan_on=small.IDS[NAN]) as running:
        both(running, "/embed_sparse", inputs())
