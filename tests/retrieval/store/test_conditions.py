"""Filters are evaluated on payloads as qdrant-client's local mode evaluates them."""

import itertools

import pytest
from qdrant_client import models
from qdrant_client.local.payload_filters import check_filter

from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.conditions import matches
from hybridtei.retrieval.store.query import filter_from

PAYLOADS = [
    {},
    {"n": 1, "word": "Hybrid search", "flag": True},
    {"n": 2.5, "word": "search", "flag": False, "tags": ["a", "b"]},
    {"n": [0, 3], "word": None, "tags": []},
    {"n": "1", "word": ["a phrase of words", "hybrid"], "tags": ["b", None]},
    {"day": "2026-01-31", "a": {"b": 1, "c.d": 5}},
    {"day": "2026-02-01T12:00:00+02:00", "a": {"b": [1, 2]}},
    {"parts": [{"kind": "x", "size": 1}, {"kind": "y", "size": 5}], "n": True},
    {"parts": [{"kind": "x", "size": 5}], "tags": "a"},
    {"place": {"lat": 52.52, "lon": 13.4}},
    {"place": {"lat": 48.85, "lon": 2.35}},
    {"place": [{"lat": 0.0, "lon": 179.5}, {"lat": 1.0, "lon": -179.5}]},
    {"place": {"lat": 52.52}},
]
SQUARE = [(40, 0), (40, 20), (60, 20), (60, 0), (40, 0)]
HOLE = [(45, 1), (45, 5), (50, 5), (50, 1), (45, 1)]


def ring(points):
    return {"points": [{"lat": lat, "lon": lon} for lat, lon in points]}


# What `test_query.py` does not ask every store.
CONDITIONS = [
    {"key": "flag", "match": {"value": False}},
    {"key": "tags[]", "match": {"value": "b"}},
    {"key": 'a."c.d"', "match": {"value": 5}},
    {"key": "word", "match": {"text_any": "phrase search"}},
    *({"key": "n", "range": bounds} for bounds in ({"gt": 1}, {"lt": 2.5}, {"lte": 2.5})),
    {"key": "day", "range": {"gt": "2026-02-01T10:00:00Z"}},
    {"key": "day", "range": {"lte": "2026-01-31T00:00:00"}},
    *({"key": "tags", "values_count": bounds} for bounds in ({"gt": 0}, {"lte": 1})),
    {"is_null": {"key": "tags"}},
    {
        "nested": {
            "key": "parts",
            "filter": {
                "must": [
                    {"key": "kind", "match": {"value": "x"}},
                    {"key": "size", "range": {"gt": 2}},
                ]
            },
        }
    },
    {
        "nested": {
            "key": "parts[]",
            "filter": {"must_not": [{"key": "size", "match": {"value": 5}}]},
        }
    },
    *(
        {"key": "place", "geo_radius": {"center": {"lat": 52.5, "lon": 13.4}, "radius": metres}}
        for metres in (2_000.0, 3_000.0)
    ),
    {
        "key": "place",
        "geo_bounding_box": {
            "top_left": {"lat": 10, "lon": 179},
            "bottom_right": {"lat": -10, "lon": -179},
        },
    },
    {"key": "place", "geo_polygon": {"exterior": ring(SQUARE), "interiors": [ring(HOLE)]}},
]
PAIRS = list(itertools.pairwise(CONDITIONS))
GROUPS = [
    *({"must": [first, second]} for first, second in PAIRS),
    *({"should": [first, second]} for first, second in PAIRS),
    *({"must_not": [first, second]} for first, second in PAIRS),
    *({"must": [first], "must_not": [second]} for first, second in PAIRS),
    *({"should": [first], "must_not": [second]} for first, second in PAIRS),
    {"must": [{"should": CONDITIONS[:2]}, {"must_not": CONDITIONS[2:4]}]},
    *({"min_should": {"conditions": CONDITIONS[:12], "min_count": count}} for count in (1, 2, 3)),
]


def places(condition):
    """The payloads that meet it, here and in qdrant-client."""
    ours = filter_from(condition)
    theirs = models.Filter(**condition)
    points = [Stored(place, payload, {}) for place, payload in enumerate(PAYLOADS)]
    return (
        [point.id for point in points if matches(ours, point)],
        [
            point.id
            for point in points
            if check_filter(theirs, point.payload, point.id, dict.fromkeys(point.vector, True))
        ],
    )


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_a_condition_holds_for_the_same_payloads(condition):
    met, wanted = places({"must": [condition]})
    assert met == wanted
    assert len(met) < len(PAYLOADS)


def test_groups_hold_for_the_same_payloads():
    for group in GROUPS:
        met, wanted = places(group)
        assert met == wanted, group


@pytest.mark.parametrize(
    ("place", "holds"),
    [
        ({"lat": 90, "lon": 180}, True),
        ({"lat": -90.0, "lon": -180.0}, True),
        ({"lat": 90.5, "lon": 0}, False),
        ({"lat": 0, "lon": 180.5}, False),
    ],
)
def test_what_is_no_place_in_degrees_is_in_no_circle(place, holds):
    circle = {"center": {"lat": 0, "lon": 0}, "radius": 3e7}
    condition = filter_from({"must": [{"key": "place", "geo_radius": circle}]})
    assert matches(condition, Stored(1, {"place": place}, {})) is holds
