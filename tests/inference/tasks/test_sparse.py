"""The strongest occurrence of each token, and the heaviest entries, against loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.batch import offsets_of
from hybridtei.inference.tasks.pooling import heaviest
from hybridtei.outputs import SparseVectors, max_weights

WIDTH = 9
TOKENS = st.tuples(st.integers(0, WIDTH - 1), st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.5]))
TEXTS = st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=1, max_size=6)


def by_loop(text, removed):
    best = {}
    for token, weight in text:
        if token not in removed and weight > 0:
            best[token] = max(best.get(token, 0.0), weight)
    return best


@given(TEXTS, st.sets(st.integers(0, WIDTH - 1)))
def test_it_equals_a_loop_over_dictionaries(texts, removed):
    flat = [token for text in texts for token in text]
    ids, weights = np.array([i for i, _ in flat]), np.array([w for _, w in flat], dtype=np.float32)
    sparse = max_weights(ids, weights, offsets_of([len(text) for text in texts]), removed, WIDTH)
    assert len(sparse) == len(texts)
    for i, text in enumerate(texts):
        indices, values = sparse.row(i)
        assert dict(zip(indices.tolist(), values.tolist(), strict=True)) == by_loop(text, removed)
        assert (np.diff(indices) > 0).all()
    assert sparse.values.dtype == np.float32


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.25, -0.5, 1.0, 3.0]), min_size=WIDTH, max_size=WIDTH),
        min_size=1,
    ),
    st.integers(1, 12),
)
def test_the_heaviest_entries_stay_in_their_places(rows, count):
    dense = np.array(rows, dtype=np.float32)
    kept = heaviest(SparseVectors.from_dense(dense), count)
    for row, after in zip(dense, kept.to_dense(), strict=True):
        assert (after[after != 0] == row[after != 0]).all()
        assert sorted(np.abs(after[after != 0])) == sorted(sorted(np.abs(row[row != 0]))[-count:])
