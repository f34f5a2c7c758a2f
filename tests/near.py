"""Arrays that are equal, or as good as."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal


def near(ours, theirs, atol, **more):
    """No number is further than `atol` from its own."""
    assert_allclose(ours, theirs, rtol=0, atol=atol, **more)


same = assert_array_equal


def scores_of(ranked):
    """The scores of ranked documents, in the order in which the documents were given."""
    return np.array([document.score for document in sorted(ranked, key=lambda row: row.index)])
