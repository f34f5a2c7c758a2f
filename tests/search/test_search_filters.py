"""Filters from JSON: taken as Qdrant takes them, and refused by place."""

from __future__ import annotations

import pytest
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.search.query import MAX_DEPTH, filter_from


def test_what_qdrant_takes():
    given = {
        "must": [{"key": "metadata.year", "range": {"gte": 2000}}, {"has_id": [1, 2]}],
        "should": {"key": "title", "match": {"any": ["a", "b"]}},
        "must_not": [{"is_empty": {"key": "x"}}, {"must": [{"key": "y", "match": {"value": 1}}]}],
    }
    found = filter_from(given)
    assert isinstance(found, models.Filter)
    assert found.must[0].range.gte == 2000
    assert filter_from(None) is None
    assert filter_from('{"must": [{"has_id": [7]}]}').must[0].has_id == [7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"must": [{"key": "year", "range": {"gte": "soon"}}]}, r"`filter\.must\[0\]\.range\.gte`: "),
        (
            {"must": [{"key": "a", "match": {"value": 1}}, {"key": "b", "match": {"valu": 1}}]},
            r"`filter\.must\[1\]\.match\.valu",
        ),
        ({"maybe": []}, r"`filter\.maybe`: "),
        ({"must_not": [{"must": [{"has_id": [1.5]}]}]}, r"`filter\.must_not\[0\]\.must\[0\]\.has_id\[0\]`: "),
        ([], "should be an object"),
        ("{", "is not JSON"),
    ],
)
def test_a_mistake_is_told_by_its_place(given, message):
    with pytest.raises(InvalidInput, match=message):
        filter_from(given)


def test_depth_and_size_are_limited():
    deep = {"must": []}
    for _ in range(5_000):
        deep = {"must": [deep]}
    with pytest.raises(InvalidInput, match=f"deeper than {MAX_DEPTH}"):
        filter_from(deep)
    allowed = {"must": [{"has_id": [1]}]}
    for _ in range(MAX_DEPTH - 3):
        allowed = {"must": [allowed]}
    assert filter_from(allowed) is not None
    with pytest.raises(InvalidInput, match="bytes"):
        filter_from({"must": [{"has_id": list(range(50_000))}]})
