"""The page's examples are what their titles say, by the embedded model."""

import json
from importlib.resources import files

import numpy as np
import pytest

from hybridtei import Encoder
from hybridtei.retrieval.search.fusion import normalised, scale_of

SCRIPT = files("hybridtei.server").joinpath("page/examples.js").read_text(encoding="utf-8")
EXAMPLES = {
    one["id"]: one
    for one in json.loads(SCRIPT.partition("EXAMPLES = ")[2].rstrip().removesuffix(";"))
}
WEIGHTS = {"dense": 1.0, "sparse": 0.7, "multivector": 1.0}
# Which kinds rank the answer first, beside the fusion, which always does
FIRST = {
    "fusion": set(),
    "dense-errs": {"sparse", "multivector"},
    "sparse-errs": {"dense", "multivector"},
}


@pytest.fixture(scope="module")
def encoder():
    return Encoder.load()


def scores(encoder, example):
    vectors = encoder.encode(
        [example["query"], *example["documents"]], outputs=("dense", "sparse", "multivector")
    )
    sparse = vectors.sparse.to_scipy()
    query, *documents = (vectors.multivector.row(row) for row in range(len(vectors.dense)))
    return {
        "dense": vectors.dense[1:] @ vectors.dense[0],
        "sparse": (sparse[1:] @ sparse[[0]].T).toarray().ravel(),
        "multivector": np.array(
            [(query @ document.T).max(axis=1).mean() for document in documents]
        ),
    }


def ranks(values):
    return np.array([1 + sum(other > one for other in values) for one in values])


@pytest.mark.parametrize("name", EXAMPLES)
def test_only_the_kinds_of_the_title_and_their_fusion_rank_the_answer_first(encoder, name):
    example = EXAMPLES[name]
    values_of = scores(encoder, example)
    found = {kind: ranks(values) for kind, values in values_of.items()}
    assert {kind for kind, places in found.items() if places[example["answer"]] == 1} == FIRST[name]
    fused = ranks(
        sum(
            normalised(values, *scale_of(values), WEIGHTS[kind])
            for kind, values in values_of.items()
        )
    )
    assert fused[example["answer"]] == 1
    assert (fused == 1).sum() == 1
