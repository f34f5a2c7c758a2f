"""Parameters of which some run by default and all in the whole suite."""

import pytest


def sampled(every, quick):
    """All of `every`, in their order; those that are not in `quick` are marked slow. Tuples are
    several arguments."""
    every = list(every)
    assert all(one in every for one in quick), f"not all of these are parameters: {quick}"
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=[] if one in quick else pytest.mark.slow,
        )
        for one in every
    ]


def paired(*axes):
    """As many combinations as the longest axis has values: every value of each axis occurs, beside
    others each time."""
    most = range(max(map(len, axes)))
    return [
        tuple(axis[i // max(place, 1) % len(axis)] for place, axis in enumerate(axes)) for i in most
    ]
