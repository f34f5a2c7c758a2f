"""Filters from JSON: taken as Qdrant takes them, and refused by place."""

from __future__ import annotations

from typing import Any

import pytest
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.store.query import MAX_CONDITIONS, MAX_DEPTH, MAX_VALUES, Filter, filter_from


def test_what_qdrant_takes():
    given = {
        "must": [{"key": "metadata.year", "range": {"gte": 2000}}, {"has_id": [1, 2]}],
        "should": {"key": "title", "match": {"any": ["a", "b"]}},
        "must_not": [{"is_empty": {"key": "x"}}, {"must": [{"key": "y", "match": {"value": 1}}]}],
    }
    found = filter_from(given)
    assert isinstance(found, Filter)
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


def matched(**match: Any) -> dict[str, Any]:
    return {"key": "a", "match": match}


HALF, REST = [matched(value=1)] * (MAX_CONDITIONS // 2), [matched(value=1)] * (MAX_CONDITIONS // 2 - 1)


@pytest.mark.parametrize(
    ("most", "further", "message"),
    [
        ({"should": HALF + HALF}, {"must": matched(value=1)}, "100 conditions"),
        ({"must_not": [{"must": HALF + REST}]}, {"must": [{"should": []}]}, "100 conditions"),
        ({"must": [{"nested": {"key": "n", "filter": {"must": HALF + REST}}}]}, {"should": [{"has_id": []}]}, "100 conditions"),
        ({"min_should": {"conditions": HALF + HALF, "min_count": 1}}, {"must": [{"is_null": {"key": "a"}}]}, "100 conditions"),
        ({"must": [matched(any=[1] * 900), {"has_id": [1] * 100}]}, {"should": [matched(any=["a"])]}, "1000 values"),
        ({"must": [matched(**{"except": [1] * MAX_VALUES})]}, {"should": [matched(text="word")]}, "1000 values"),
        ({"must": [matched(text_any="a " * MAX_VALUES)]}, {"should": [matched(phrase="b")]}, "1000 values"),
    ],
)
def test_what_is_compared_with_each_point_is_limited(most: Any, further: Any, message: str) -> None:
    """As JSON, and as the models that a library's user makes."""
    assert filter_from(most) is not None
    with pytest.raises(InvalidInput, match=f"`filter` holds more than {message}"):
        filter_from({**most, **further})
    with pytest.raises(InvalidInput, match=f"`query_filter` holds more than {message}"):
        filter_from(models.Filter(**{**most, **further}), "query_filter")


def test_mistakes_in_many_conditions_are_not_looked_for() -> None:
    with pytest.raises(InvalidInput, match="100 conditions"):
        filter_from({"should": [matched(valu=1)] * 2_000})


@pytest.mark.parametrize(
    ("condition", "typo", "meant"),
    [({"key": "a", "matches": {"value": 1}}, "matches", "match"), ({"has_ids": [1]}, "has_ids", "has_id")],
)
def test_a_typo_is_named_where_it_stands(condition: Any, typo: str, meant: str) -> None:
    with pytest.raises(InvalidInput, match=rf"`filter\.must\[0\]\.{typo}`: .*; `{meant}` was probably meant"):
        filter_from({"must": [condition]})
