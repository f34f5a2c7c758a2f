"""Parameters of which some run by default and all in the whole suite."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(every: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All of `every`, in their order; those that are not in `quick` are marked slow. Tuples are several arguments."""
    every = list(every)
    assert set(quick) <= set(every), f"not among the parameters: {set(quick) - set(every)}"
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=[] if one in quick else pytest.mark.slow)
        for one in every
    ]
