"""Filters: read from JSON, refused by place, bounded; every condition finds the same in every
store."""

import json
import sys

import pytest
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.store.points import to_points
from hybridtei.retrieval.store.query import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_VALUES,
    filter_from,
)
from tests.retrieval.store.stores import KINDS, asked, embeddings, leg


def test_what_qdrant_takes():
    given = {
        "must": [{"key": "metadata.year", "range": {"gte": 2000}}, {"has_id": [1, 2]}],
        "should": {"key": "title", "match": {"any": ["a", "b"]}},
        "must_not": [{"is_empty": {"key": "x"}}, {"must": [{"key": "y", "match": {"value": 1}}]}],
    }
    assert filter_from(given).must[0].range.gte == 2000
    assert filter_from(None) is None
    assert filter_from('{"must": [{"has_id": [7]}]}').must[0].has_id == [7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"must": [{"key": "year", "range": {"gte": "soon"}}]},
            r"`filter\.must\[0\]\.range\.gte`: ",
        ),
        (
            {"must": [{"has_ids": [1]}]},
            r"`filter\.must\[0\]\.has_ids`: .*; `has_id` was probably meant",
        ),
        (
            {"must_not": [{"must": [{"has_id": [1.5]}]}]},
            r"`filter\.must_not\[0\]\.must\[0\]\.has_id\[0\]`: ",
        ),
        ([], r"should be an object .* looks like {.must.: \[{.key.: .lang., .match.:"),
        ({"lang": "de"}, r'lang`: there is no such field; a filter .* "lang", .* "de"}}\]}'),
        ('{"a": 1, "b": true}', r'"key": "a", .* 1}}, {"key": "b", "match": {"value": true}}\]}'),
        ({"must": [{"key": "lang", "match": "en"}]}, r"got `str`; a filter looks like"),
        ({"must": [{"key": "lang", "value": "en"}]}, r"value`: there is no such field; a filter"),
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


@pytest.mark.parametrize(
    "large",
    [
        {"must": [[]] * 200_000},
        {"must": [{"key": "text", "match": {"text": "a " * 100_000}}]},
        dict.fromkeys(map(str, range(50_000))),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bytes_are_bounded_before_a_step_for_each_item(large, as_json):
    """Python's steps hold up the server's other requests; writing or reading JSON takes a hundredth
    of the time."""
    value = json.dumps(large) if as_json else large
    steps = 0

    def count(*_):
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        with pytest.raises(InvalidInput, match="`filter` has more than 100000 bytes"):
            filter_from(value)
    finally:
        sys.setprofile(None)
    assert steps < 2_000


def matched(**match):
    return {"key": "a", "match": match}


HALF = [matched(value=1)] * (MAX_CONDITIONS // 2)
REST = HALF[1:]


@pytest.mark.parametrize(
    ("most", "further", "message"),
    [
        ({"should": HALF + HALF}, {"must": matched(value=1)}, "100 conditions"),
        ({"must_not": [{"must": HALF + REST}]}, {"must": [{"should": []}]}, "100 conditions"),
        (
            {"must": [{"nested": {"key": "n", "filter": {"must": HALF + REST}}}]},
            {"should": [{"has_id": []}]},
            "100 conditions",
        ),
        (
            {"min_should": {"conditions": HALF + HALF, "min_count": 1}},
            {"must": [{"is_null": {"key": "a"}}]},
            "100 conditions",
        ),
        (
            {"must": [matched(any=[1] * 900), {"has_id": [1] * 100}]},
            {"should": [matched(any=["a"])]},
            "1000 values",
        ),
        (
            {"must": [matched(**{"except": [1] * MAX_VALUES})]},
            {"should": [matched(text="word")]},
            "1000 values",
        ),
        (
            {"must": [matched(text_any="a " * MAX_VALUES)]},
            {"should": [matched(phrase="b")]},
            "1000 values",
        ),
    ],
)
def test_what_is_compared_with_each_point_is_limited(most, further, message):
    """As JSON, and as the models that a library's user makes."""
    assert filter_from(most) is not None
    with pytest.raises(InvalidInput, match=f"`filter` holds more than {message}"):
        filter_from({**most, **further})
    with pytest.raises(InvalidInput, match=f"`query_filter` holds more than {message}"):
        filter_from(models.Filter(**{**most, **further}), "query_filter")


def test_mistakes_in_many_conditions_are_not_looked_for():
    with pytest.raises(InvalidInput, match="100 conditions"):
        filter_from({"should": [matched(valu=1)] * 2_000})


MISSING = object()
BERLIN, ORIGIN = {"lat": 52.5, "lon": 13.4}, {"lat": 0, "lon": 0}
VALUES = {
    "true": True,
    "false": False,
    "1": 1,
    "0": 0,
    "-3": -3,
    "1.0": 1.0,
    "2.5": 2.5,
    "red": "red",
    "text": "Red wine, dry",
    "clause": "この地図は駅前にある",
    "null": None,
    "nothing": MISSING,
    "empty": [],
    "reds": ["red", "blue"],
    "ints": [1, 2, 3],
    "truths": [True],
    "day": "2024-05-06",
    "hour": "2024-05-06T10:00:00Z",
    "berlin": BERLIN,
    "origins": [ORIGIN],
    "shore": {"lat": 0.9, "lon": 0.9},
    "east": {"lat": 1, "lon": -179.5},
    "pole": {"lat": 90, "lon": 180},
    "objects": [{"n": 1, "t": "a", "x.y": 5}, {"n": 2, "t": "b"}],
    "gaps": ["b", None],
}
NAMES = list(VALUES)
ALL, THERE = (
    " ".join(NAMES),
    " ".join(name for name in NAMES if name not in ("null", "nothing", "empty")),
)


def box(north, west, south, east):
    return {"top_left": {"lat": north, "lon": west}, "bottom_right": {"lat": south, "lon": east}}


def circle(lat, lon, metres):
    return {"center": {"lat": lat, "lon": lon}, "radius": metres}


def square(size):
    corners = ((-1, -1), (-1, 1), (1, 1), (1, -1), (-1, -1))
    return {"points": [{"lat": lat * size, "lon": lon * size} for lat, lon in corners]}


def without(names):
    return " ".join(name for name in THERE.split() if name not in names.split())


# What a condition of the key `v` finds.
OF_A_KEY = [
    # True is not 1
    ({"match": {"value": True}}, "true truths"),
    ({"match": {"value": False}}, "false"),
    ({"match": {"value": 1}}, "1 ints"),
    ({"match": {"value": 0}}, "0"),
    ({"match": {"value": "red"}}, "red reds"),
    ({"match": {"value": "Red"}}, ""),
    ({"match": {"text": "dry red"}}, "text"),
    ({"match": {"text": "re"}}, ""),
    ({"match": {"text_any": "dry red"}}, "red text reds"),
    ({"match": {"phrase": "wine dry"}}, "text"),
    ({"match": {"phrase": "dry wine"}}, ""),
    ({"match": {"prefix": "re"}}, "red reds"),
    ({"match": {"substring": "ed w"}}, "text"),
    ({"match": {"substring": "地図"}}, "clause"),
    ({"match": {"any": ["red", "blue"]}}, "red reds"),
    ({"match": {"any": [1, 0]}}, "1 0 ints"),
    ({"match": {"any": []}}, ""),
    ({"match": {"except": ["red"]}}, without("red")),
    ({"match": {"except": [1]}}, without("1")),
    ({"range": {"gte": 1}}, "1 1.0 2.5 ints"),
    ({"range": {"gt": 1, "lte": 2.5}}, "2.5 ints"),
    ({"range": {"gt": 1, "lt": 2.5}}, "ints"),
    ({"range": {"lt": 0}}, "-3"),
    ({"range": {"gte": "2024-05-06"}}, "day hour"),
    ({"range": {"lt": "2024-05-06T10:00:00Z"}}, "day"),
    ({"range": {"gte": "2024-05-06T10:00:00+02:00"}}, "hour"),
    ({"range": {"gt": "2024-05-06T10:00:00Z"}}, ""),
    ({"range": {"lte": "2024-05-06T00:00:00"}}, "day"),
    ({"values_count": {"gte": 2}}, "reds ints objects gaps"),
    ({"values_count": {"gt": 1, "lte": 2}}, "reds objects gaps"),
    ({"values_count": {"lt": 1}}, "null nothing empty"),
    ({"values_count": {}}, ALL),
    # Berlin is 6,769 m away
    ({"geo_radius": circle(52.5, 13.3, 6_800)}, "berlin"),
    ({"geo_radius": circle(52.5, 13.3, 6_700)}, ""),
    ({"geo_radius": circle(0, 0, 3e7)}, "berlin origins shore east pole"),
    ({"geo_bounding_box": box(53, 13, 52, 14)}, "berlin"),
    ({"geo_bounding_box": box(10, 179, -10, -179)}, "east"),
    ({"geo_polygon": {"exterior": square(1)}}, "origins shore"),
    ({"geo_polygon": {"exterior": square(1), "interiors": [square(0.5)]}}, "shore"),
    ({"is_empty": True}, "null nothing empty"),
    ({"is_empty": False}, THERE),
    ({"is_null": True}, "null gaps"),
]


def nested(key, **clauses):
    return {"nested": {"key": key, "filter": clauses}}


def number(value):
    return {"key": "n", "match": {"value": value}}


OTHERS = [
    ({"is_empty": {"key": "v"}}, "null nothing empty"),
    ({"is_null": {"key": "v"}}, "null gaps"),
    ({"has_id": [NAMES.index("1"), 999]}, "1"),
    ({"has_id": []}, ""),
    ({"has_vector": "dense"}, ALL),
    ({"has_vector": "image"}, ""),
    (nested("v", must=[number(2), {"key": "t", "match": {"value": "b"}}]), "objects"),
    (nested("v", must=[number(1), {"key": "t", "match": {"value": "b"}}]), ""),
    (nested("v[]", must_not=[number(1)]), "origins objects"),
    ({"key": "v[]", "match": {"value": "blue"}}, "reds"),
    ({"key": 'v[]."x.y"', "match": {"value": 5}}, "objects"),
    ({"key": "v[].n", "match": {"value": 2}}, "objects"),
    ({"key": "v[1]", "match": {"value": 2}}, "ints"),
    ({"key": '"v"', "match": {"value": "red"}}, "red reds"),
    (
        {"should": [{"key": "v", "match": {"value": 0}}, {"key": "v", "match": {"value": -3}}]},
        "0 -3",
    ),
    (
        {
            "must": {"key": "v", "range": {"gte": 1}},
            "must_not": [{"key": "v", "match": {"value": 1}}],
        },
        "1.0 2.5",
    ),
    ({}, ALL),
]
LEAST = {
    "conditions": [{"key": "v", "range": {"gte": 1}}, {"key": "v", "values_count": {"gte": 2}}],
    "min_count": 2,
}
OTHERS.append(({"min_should": LEAST}, "ints"))


@pytest.fixture(scope="module", params=KINDS)
def stored(request, tmp_path_factory):
    with asked(request.param, tmp_path_factory.mktemp("conditions")) as one:
        payloads = [
            {"name": name} | ({} if value is MISSING else {"v": value})
            for name, value in VALUES.items()
        ]
        one.fill(to_points(embeddings(len(NAMES)), list(range(len(NAMES))), payloads))
        yield one


@pytest.mark.parametrize(
    ("condition", "names"),
    [*(({"key": "v", **one}, names) for one, names in OF_A_KEY), *OTHERS],
    ids=str,
)
def test_every_condition_means_the_same_in_every_store(stored, condition, names):
    wanted = set(names.split())
    for clause, found in (("must", wanted), ("must_not", set(NAMES) - wanted)):
        only = filter_from({clause: [condition]})
        assert stored.count(only) == len(found)
        records, _ = stored.scroll(limit=len(NAMES), scroll_filter=only)
        assert {record.payload["name"] for record in records} == found
        query = leg(embeddings(1), limit=len(NAMES), filter=only, with_payload=["name"])
        points = stored.query(query)
        assert sorted(point.payload["name"] for point in points) == sorted(found)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"match": {"value": 1.5}}, r"match\.value`: expected `bool \| int \| str"),
        ({"match": {"any": [True]}}, r"match\.any\[0\]`: expected `int \| str`, got `bool`"),
        ({"match": {"any": [1, "a"]}}, "integers, or all be texts"),
        ({"match": {"value": 1, "text": "a"}}, "should have one of value, text"),
        ({"match": {"text": "地図"}}, "write `substring`"),
        ({"match": {"text_any": "maps カメラ"}}, "write `substring`"),
        ({"match": {"phrase": "แผนที่"}}, "write `substring`"),
        (
            {"match": {"value": 1}, "range": {"gte": 1}},
            "beside `key` should be one of match, range",
        ),
        ({"range": {"gte": "2024-13-01"}}, r"range`: month must be in"),
        ({"range": {"gte": 1, "lt": "2024-01-01"}}, "numbers as bounds, or times"),
        (
            {"geo_radius": circle(95, 0, 1)},
            r"center\.lat`: expected `float` <= 90",
        ),
        (
            {"geo_polygon": {"exterior": {"points": square(1)["points"][:4]}}},
            "the last equal to the first",
        ),
        ({"values_count": {"gt": -1}}, r"values_count\.gt`: expected `int` >= 0"),
        ({}, "beside `key` should be one of match"),
    ],
)
def test_what_some_store_refuses_is_refused_for_all(condition, message):
    with pytest.raises(InvalidInput, match=rf"`filter\.must\[0\].*{message}"):
        filter_from({"must": [{"key": "v", **condition}]})
