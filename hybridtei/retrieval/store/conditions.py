"""Filters evaluated on payloads in this process, as Qdrant does without payload indexes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import asin, cos, radians, sin, sqrt
from typing import Any

from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.query import Filter, GeoLine, Match, Range, ValuesCount

# The parts of a key: "a quoted name", a name, [] or [0]
PATH = re.compile(r'"([^"]*)"|([\w-]+)|\[(\d*)\]')
WORD = re.compile(r"[^\W_]+")
EARTH_RADIUS_M = 6_371_008.8


def matches(condition: Filter, point: Stored) -> bool:
    """True if the point meets a filter, or one condition of a filter."""
    if not condition.is_group:
        return _meets(condition, point)
    if not all(matches(part, point) for part in _listed(condition.must)):
        return False
    if any(matches(part, point) for part in _listed(condition.must_not)):
        return False
    should = _listed(condition.should)
    if should and not any(matches(part, point) for part in should):
        return False
    least = condition.min_should
    if least is None:
        return True
    return sum(matches(part, point) for part in least.conditions) >= least.min_count


def values_at(payload: Any, key: str) -> list[Any]:
    """The values at a key such as `a.b[].c`."""
    values = [payload]
    for quoted, name, place in PATH.findall(key):
        field = quoted or name
        if field:
            values = [
                value[field] for value in values if isinstance(value, dict) and field in value
            ]
            continue
        lists = [value for value in values if isinstance(value, list)]
        if place:
            values = [items[int(place)] for items in lists if int(place) < len(items)]
        else:
            values = [item for items in lists for item in items]
    return values


def _listed(conditions: Filter | list[Filter] | None) -> Sequence[Filter]:
    if conditions is None:
        return ()
    return conditions if isinstance(conditions, list) else [conditions]


def _meets(condition: Filter, point: Stored) -> bool:
    if condition.has_id is not None:
        return point.id in condition.has_id
    if condition.has_vector is not None:
        return condition.has_vector in point.vector
    if condition.nested is not None:
        inner = condition.nested.filter
        # One object of the list has to meet the whole inner filter, as if it were a payload
        return any(
            matches(inner, Stored(-1, item, {}))
            for values in values_at(point.payload, condition.nested.key.removesuffix("[]"))
            if isinstance(values, list)
            for item in values
            if isinstance(item, dict)
        )
    for name, holds in (("is_empty", _is_empty), ("is_null", _has_null)):
        expected = getattr(condition, name)
        if expected is not None:
            # `is_empty` and `is_null` name a key, or are true or false beside a condition's key
            key = condition.key or expected.key
            return holds(values_at(point.payload, key)) is (expected is not False)
    assert condition.key is not None
    values = values_at(point.payload, condition.key)
    if condition.values_count is not None:
        counts = [_count(value) for value in values] or [0]
        return any(_is_within(count, condition.values_count) for count in counts)
    return any(_holds(condition, value) for value in _flat(values))


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from value
        else:
            yield value


def _is_empty(values: list[Any]) -> bool:
    return all(value is None or value == [] for value in values)


def _has_null(values: list[Any]) -> bool:
    return any(value is None or (isinstance(value, list) and None in value) for value in values)


def _count(value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    return int(value is not None)


def _holds(condition: Filter, value: Any) -> bool:
    """True if one value at the condition's key meets it."""
    if condition.match is not None:
        return _is_match(condition.match, value)
    if condition.range is not None:
        return _is_in_range(condition.range, value)
    return _has_place(value) and _is_near(condition, value["lat"], value["lon"])


def _has_place(value: Any) -> bool:
    """True for a place in degrees. Qdrant passes over any other value too."""
    if not (isinstance(value, dict) and {"lat", "lon"} <= value.keys()):
        return False
    lat, lon = value["lat"], value["lon"]
    return _is_number(lat) and _is_number(lon) and abs(lat) <= 90 and abs(lon) <= 180


def _is_near(condition: Filter, lat: float, lon: float) -> bool:
    circle, box = condition.geo_radius, condition.geo_bounding_box
    if circle is not None:
        return _metres(lat, lon, circle.center.lat, circle.center.lon) < circle.radius
    if box is not None:
        west, east = box.top_left.lon, box.bottom_right.lon
        # A box across the 180th meridian has its west in the east
        is_between = west < lon < east if west <= east else lon > west or lon < east
        return bool(is_between and box.bottom_right.lat < lat < box.top_left.lat)
    assert condition.geo_polygon is not None
    rings = condition.geo_polygon
    return _is_inside(lat, lon, rings.exterior) and not any(
        _is_inside(lat, lon, ring) for ring in rings.interiors
    )


def _metres(lat: float, lon: float, other_lat: float, other_lon: float) -> float:
    """The great-circle distance, by the haversine formula."""
    north, east = radians(other_lat - lat) / 2, radians(other_lon - lon) / 2
    chord = sin(north) ** 2 + cos(radians(lat)) * cos(radians(other_lat)) * sin(east) ** 2
    return 2 * EARTH_RADIUS_M * asin(sqrt(chord))


def _is_inside(lat: float, lon: float, ring: GeoLine) -> bool:
    """True if a line to the east crosses the ring an odd number of times."""
    inside = False
    for begin, end in zip(ring.points, ring.points[1:], strict=False):
        if (begin.lat > lat) is (end.lat > lat):
            continue
        crossing = begin.lon + (lat - begin.lat) / (end.lat - begin.lat) * (end.lon - begin.lon)
        if lon < crossing:
            inside = not inside
    return inside


def _is_equal(value: Any, other: Any) -> bool:
    """True if type and value are equal: true is not 1, and 1.0 is not 1."""
    return type(value) is type(other) and value == other


def _is_match(match: Match, value: Any) -> bool:
    if match.value is not None:
        return _is_equal(value, match.value)
    if match.any is not None:
        return any(_is_equal(value, other) for other in match.any)
    if match.except_ is not None:
        refused = any(_is_equal(value, other) for other in match.except_)
        return value is not None and not refused
    return isinstance(value, str) and _has_text(match, value)


def _has_text(match: Match, value: str) -> bool:
    if match.prefix is not None:
        return value.startswith(match.prefix)
    if match.substring is not None:
        return match.substring in value
    words = _words(value)
    if match.text is not None:
        terms = _words(match.text)
        return bool(terms) and set(terms) <= set(words)
    if match.text_any is not None:
        return not set(words).isdisjoint(_words(match.text_any))
    assert match.phrase is not None
    # Blanks keep a word from matching a part of a word
    phrase = " ".join(_words(match.phrase))
    return bool(phrase) and f" {phrase} " in f" {' '.join(words)} "


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _is_in_range(bounds: Range, value: Any) -> bool:
    of_times = any(
        isinstance(bound, str) for bound in (bounds.gt, bounds.gte, bounds.lt, bounds.lte)
    )
    if of_times:
        return isinstance(value, str) and _is_within(value, bounds, _time)
    return _is_number(value) and _is_within(value, bounds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _time(text: Any) -> datetime | None:
    """A time with its zone, UTC if it has none. None for another text."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _is_within(value: Any, bounds: Range | ValuesCount, read: Any = lambda value: value) -> bool:
    value = read(value)
    return value is not None and (
        (bounds.gt is None or value > read(bounds.gt))
        and (bounds.gte is None or value >= read(bounds.gte))
        and (bounds.lt is None or value < read(bounds.lt))
        and (bounds.lte is None or value <= read(bounds.lte))
    )
