"""Similarities against loops over one pair at a time, without padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import Ragged, offsets_of
from hybridtei.inference.tasks import rerank as similarity
from hybridtei.inference.tasks.rerank import maxsim, sparse_dot
from hybridtei.outputs import SparseVectors

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def unit_rows(count, seed):
    rows = np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@given(lengths, st.integers(0, 7), st.booleans(), st.sampled_from([1, 20, 4_000_000]))
def test_maxsim_is_the_sum_of_the_best_matches(counts, asked, mean, block):
    query, documents = unit_rows(asked, 1), Ragged(unit_rows(sum(counts), 2), offsets_of(counts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "BLOCK", block)
        scores = maxsim(query, documents, mean=mean)
    for score, rows in zip(scores, documents, strict=True):
        best = sum(max((float(one @ other) for other in rows), default=-1.0) for one in query)
        assert score == pytest.approx(best / asked if mean and asked else best, abs=1e-5)


@given(st.lists(st.lists(st.integers(0, 1), min_size=8, max_size=8), min_size=2, max_size=6))
def test_sparse_dot_is_the_dense_one(rows):
    dense = np.array(rows, np.float32) * np.arange(1, 9, dtype=np.float32)
    vectors = SparseVectors.from_dense(dense)
    scores = sparse_dot(vectors.take([0]), vectors.take(range(1, len(rows))))
    np.testing.assert_allclose(scores, dense[1:] @ dense[0], rtol=1e-6)
