"""Arrays that are equal, or as good as."""

from numpy.testing import assert_allclose, assert_array_equal


def near(ours, theirs, atol, **more):
    """No number is further than `atol` from its own."""
    assert_allclose(ours, theirs, rtol=0, atol=atol, **more)


same = assert_array_equal
