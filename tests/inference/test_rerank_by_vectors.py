"""Reranking without a second model: BGE-M3's three similarities, weighted, from one pass."""

import numpy as np
import pytest

from conformance.small import tiny, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, LoadError
from hybridtei.inference.tasks.rerank import (
    PRESETS,
    RankWeights,
    RerankByVectors,
    rerank_task,
)
from hybridtei.models.text.reader import TextReader
from hybridtei.options import RankOptions
from tests.near import near
from tests.sampled import sampled

QUERY, *DOCUMENTS = dict.fromkeys(vocabulary.texts(40, seed=3))
EVERYTHING = ("dense", "sparse", "multivector")


@pytest.fixture(scope="module", params=["m3", "hybrid"])
def encoder(request):
    loaded = Encoder.load(request.getfixturevalue(request.param))
    yield loaded
    loaded.close()


def expected(encoder, query, document, weights):
    """The formulas, one pair at a time, each text by itself."""
    q, d = (encoder.encode([text], EVERYTHING) for text in (query, document))
    dense = float(q.dense[0] @ d.dense[0])
    sparse = float(q.sparse.to_dense()[0] @ d.sparse.to_dense()[0])
    colbert = float((q.multivector.row(0) @ d.multivector.row(0).T).max(axis=1).mean())
    total = weights.dense + weights.sparse + weights.multivector
    return (weights.dense * dense + weights.sparse * sparse + weights.multivector * colbert) / total


@pytest.mark.parametrize(
    "weights",
    sampled(
        [
            None,
            *PRESETS,
            RankWeights(0, 0, 1),
            RankWeights(0, 2, 0),
            RankWeights(1, 0, 0),
            RankWeights(1, 0.3, 0),
        ],
        [None, "m3", RankWeights(1, 0.3, 0)],
    ),
)
def test_scores_are_the_weighted_mean_of_three_similarities(encoder, weights):
    shares = (
        weights
        if isinstance(weights, RankWeights)
        else RankWeights()
        if weights is None
        else PRESETS[weights]
    )
    ranked = encoder.rerank(QUERY, DOCUMENTS, weights=weights)
    wanted = np.array([expected(encoder, QUERY, document, shares) for document in DOCUMENTS])
    near([one.score for one in ranked], [wanted[one.index] for one in ranked], 1e-5)
    assert [one.index for one in ranked] == np.argsort(wanted, kind="stable")[::-1].tolist()


def test_the_query_is_read_once_however_many_parts(encoder, monkeypatch):
    read = []
    original = TextReader.read

    def spying(self, inputs, **options):
        read.extend(inputs)
        return original(self, inputs, **options)

    monkeypatch.setattr(TextReader, "read", spying)
    documents = [f"{DOCUMENTS[i % len(DOCUMENTS)]} bulo" for i in range(700)]
    ranked = encoder.rerank(QUERY, documents)
    assert read.count(QUERY) == 1
    assert len(read) == 701
    assert len(ranked) == 700
    alone = encoder.rerank(QUERY, [ranked[0].text])[0]
    assert alone.score == pytest.approx(ranked[0].score, abs=1e-5)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("nobody's", "known: m3, m3-long, m3-two"),
        (RankWeights(0, 0, 0), "at least 0"),
        (RankWeights(-1, 1, 1), "at least 0"),
        (RankWeights(float("nan"), 1, 1), "at least 0"),
        (RankWeights(float("inf"), 1, 1), "at least 0"),
    ],
)
def test_weights_that_are_none(encoder, weights, words):
    with pytest.raises(InvalidInput, match=words):
        encoder.rerank(QUERY, DOCUMENTS, weights=weights)


def test_a_share_for_what_the_model_lacks_is_refused_but_presets_do_without(tmp_path):
    tiny.write_m3(tmp_path)
    (tmp_path / "colbert_linear.pt").unlink()
    encoder = Encoder.load(tmp_path)
    assert encoder.rerank(QUERY, DOCUMENTS, weights="m3")
    assert encoder.rerank(QUERY, DOCUMENTS, weights=RankWeights(1, 1, 0)) == encoder.rerank(
        QUERY, DOCUMENTS
    )
    with pytest.raises(InvalidInput, match="`multivector`"):
        encoder.rerank(QUERY, DOCUMENTS, weights=RankWeights(1, 1, 0.5))


def test_only_what_counts_is_computed(encoder):
    task = rerank_task(encoder.spec, QUERY, DOCUMENTS, RankOptions(weights=RankWeights(0, 1, 0)))
    assert isinstance(task, RerankByVectors)
    assert task.heads == {"sparse"}


def test_shares_that_the_model_declares_are_its_default(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    tiny.write_own_heads(folder, rerank={"dense": 0.25, "sparse": 0.05, "multivector": 1.0})
    model = Encoder.load(folder)
    declared, same = (
        model.rerank(QUERY, DOCUMENTS),
        model.rerank(QUERY, DOCUMENTS, weights=RankWeights(0.25, 0.05, 1.0)),
    )
    assert declared == same
    assert declared != model.rerank(QUERY, DOCUMENTS, weights=RankWeights())


def test_declared_shares_that_make_no_sense_are_refused(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    tiny.write_own_heads(folder, rerank={"dense": -1, "sparse": 0.05, "multivector": 1.0})
    with pytest.raises(LoadError, match="rerank"):
        Encoder.load(folder)
