"""Values that are no places. `test_query.py` asks every store for what all conditions find."""

import pytest

from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.conditions import matches
from hybridtei.retrieval.store.query import filter_from


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
