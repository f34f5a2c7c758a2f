"""`conformance/numerics/alone_or_together.py` against servers in this process, and that it finds what depends on company."""

from __future__ import annotations

import threading
from math import inf
from typing import Any

import httpx
import pytest

from conformance.numerics.alone_or_together import ROUTES, TOLERANCE, Route, asker, compared, difference, drawn
from tests.sampled import sampled
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import serving

SPECS = {
    "hybrid": lambda: None,
    "reranker": lambda: labelled("LABEL_0"),
    "classifier": lambda: labelled(*LABELS),
    "tagger": lambda: labelled(*TAGS, tags=True),
}


@pytest.mark.parametrize("alias", sampled(SPECS, ["hybrid"]))
def test_company_makes_no_difference(alias: str):
    texts = drawn(12, 0)
    routes = [route for route in ROUTES if route.alias == alias and not route.path.startswith("/qdrant")]
    assert routes
    with (
        serving(SPECS[alias]()) as running,
        httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client,
    ):
        for route in routes:
            apart = compared(asker(client, aliases=False), route, texts)
            assert max(apart.values()) <= TOLERANCE, (route.name, apart)


def test_what_depends_on_company_is_found():
    """Of an asker whose numbers grow with the batch, and of one that counts calls."""
    route = Route("x", "/embed", lambda texts: texts, list)
    apart = compared(lambda _alias, _path, texts: [[len(texts) * 1e-3] for _ in texts], route, ["a", "b", "c"])
    assert apart["again"] == apart["concurrent"] == 0
    assert apart["batched"] == apart["reversed"] == pytest.approx(2e-3)
    calls, lock = [0], threading.Lock()

    def counting(_alias: str, _path: str, texts: list[str]) -> Any:
        with lock:
            calls[0] += 1
        return [[float(calls[0])] for _ in texts]

    assert min(compared(counting, route, ["a", "b"]).values()) >= 1


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ({"a": 0.25}, {"b": 0.5}, 0.5),
        ([1.0], [1.0, 2.0], inf),
        ({"word": "a", "start": 1}, {"word": "b", "start": 1}, inf),
        ({"start": 1}, {"start": 3}, 2),
        (None, None, 0.0),
        ([None], [0.0], inf),
        ("a", 1.0, inf),
    ],
)
def test_differences(one: Any, other: Any, apart: float):
    assert difference(one, other) == apart


def test_texts_are_of_very_different_lengths():
    lengths = sorted(len(text.split()) for text in drawn(40, 0))
    assert lengths[0] <= 2
    assert lengths[-1] >= 100
