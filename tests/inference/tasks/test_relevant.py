"""Spans that made a document's rank: whose matches they are, and where they stand in the text."""

import httpx
import numpy as np
import pytest

from hybridtei.encoder import Encoder
from hybridtei.inference.tasks.relevant import RelevantSpan, RelevantSpans, relevant_spans
from tests.server.live import commanded

SENTENCES = (
    "Öl prices rose again in March. ",
    "Bees dance in the hive to show the others where flowers are.\n",
    "The museum opens at nine.",
)
TEXT = "".join(SENTENCES)
QUERY = "how do bees tell each other where the flowers are"


@pytest.fixture(scope="module")
def url():
    with commanded("--auto-truncate") as started:
        yield started


def asked(url, documents, **options):
    spans = {"relevant_spans": options} if options else {}
    body = {"query": QUERY, "documents": documents, **spans}
    return httpx.post(f"{url}/v2/rerank", json=body)


def ranked(url, documents, **options):
    return asked(url, documents, **options).json()["results"]


def test_the_best_span_is_the_sentence_that_answers(url):
    (item,) = ranked(url, [TEXT], mode="enabled")
    spans = item["relevant_spans"]
    best = spans[0]
    assert TEXT[best["start"] : best["end"]] == SENTENCES[1].strip()
    scores = [span["score"] for span in spans]
    assert scores == sorted(scores, reverse=True)
    assert all(0.1 <= score <= 1 for score in scores)
    (one,) = ranked(url, [TEXT], mode="enabled", max_spans=1)
    assert one["relevant_spans"] == [best]
    (none,) = ranked(url, [TEXT], mode="enabled", threshold=1)
    assert "relevant_spans" not in none


def test_what_is_not_asked_for_stays_as_it_is(url):
    texts = [TEXT, "Bees."]
    plain = ranked(url, texts)
    assert ranked(url, texts, mode="disabled") == plain
    assert [item.keys() for item in plain] == [{"index", "relevance_score"}] * 2
    for item, spanned in zip(plain, ranked(url, texts, mode="enabled"), strict=True):
        assert {**spanned, **item} == spanned
    for wrong in (
        {"mode": "on"},
        {"mode": "enabled", "threshold": 2},
        {"mode": "enabled", "max_spans": 33},
    ):
        assert asked(url, texts, **wrong).status_code == 422


def test_coheres_own_client_reads_them(url):
    cohere = pytest.importorskip("cohere", reason="Cohere's client is not installed")
    client = cohere.ClientV2(api_key="-", base_url=url, max_retries=0)
    asked = cohere.types.RerankRelevantSpans(mode="enabled", threshold=0.2)
    (item,) = client.rerank(model="-", query=QUERY, documents=[TEXT], relevant_spans=asked).results
    best = item.relevant_spans[0]
    assert TEXT[best.start : best.end] == SENTENCES[1].strip()


@pytest.mark.parametrize("name", ["m3", "hybrid"])
def test_all_gains_together_are_maxsim(name, request):
    """Without a threshold, of texts of words alone, the shares of the spans sum to what the
    document's tokens give."""
    encoder = Encoder.load(request.getfixturevalue(name))
    model = encoder._model
    texts = ["baka beke bolo. dumi duna! boti", "kaba " * 300, "buka"]
    query = encoder.encode(["bolo duna"], ["multivector"], input_type="query")
    documents = encoder.encode(texts, ["multivector"], input_type="document", truncate=True)
    encodings = model.reader.locate(texts, truncate=True)
    found = relevant_spans(
        model.spec, query, encodings, documents, RelevantSpans("enabled", threshold=0)
    )
    assert any(found)
    for text, spans, row in zip(texts, found, range(3), strict=True):
        alike = query.multivector.row(0) @ documents.multivector.row(row).T
        assert sum(span.score for span in spans) <= np.maximum(alike.max(axis=1), 0).mean() + 1e-5
        assert all(0 <= span.start < span.end <= len(text) for span in spans)
    assert all(isinstance(span, RelevantSpan) for span in found[0])
    encoder.close()
