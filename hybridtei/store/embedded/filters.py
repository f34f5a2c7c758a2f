"""Filters in the words of the embedded engine, from their JSON. Runs in the owner process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import qdrant_edge as edge

from hybridtei.store.embedded.types_on_disk import Plain

_MATCHES = {
    "value": "MatchValue",
    "text": "MatchText",
    "text_any": "MatchTextAny",
    "phrase": "MatchPhrase",
    "prefix": "MatchPrefix",
    "substring": "MatchSubstring",
    "any": "MatchAny",
    "except": "MatchExcept",
}


def filter_of(given: Plain | None) -> Any:
    """None stays None."""
    if given is None:
        return None
    least = given.get("min_should")
    return edge.Filter(
        must=_conditions(given.get("must")),
        should=_conditions(given.get("should")),
        must_not=_conditions(given.get("must_not")),
        min_should=least and edge.MinShould(_conditions(least["conditions"]) or [], least["min_count"]),
    )


def _conditions(given: Any) -> list[Any] | None:
    if given is None:
        return None
    return [condition_of(condition) for condition in ([given] if isinstance(given, Mapping) else given)]


def condition_of(given: Plain) -> Any:
    """One condition, or a filter inside a filter. Raises ValueError for kinds the engine lacks."""
    if "key" in given:  # first, since a field's condition may also say `is_empty`
        return _field(given)
    for key, make in _CONDITIONS.items():
        if key in given:
            return make(given[key])
    if set(given) <= {"must", "should", "must_not", "min_should"}:
        return filter_of(given)
    raise ValueError(f"the embedded engine has no condition {'/'.join(given)}")


_CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "is_empty": lambda body: edge.IsEmptyCondition(body["key"]),
    "is_null": lambda body: edge.IsNullCondition(body["key"]),
    "has_id": lambda body: edge.HasIdCondition(set(body)),
    "has_vector": edge.HasVectorCondition,
    "nested": lambda body: edge.NestedCondition(body["key"], filter_of(body["filter"])),
}


def _field(given: Plain) -> edge.FieldCondition:
    match, count = given.get("match"), given.get("values_count")
    return edge.FieldCondition(
        key=given["key"],
        match=match and _match(match),
        range=_range(given.get("range")),
        values_count=count and edge.ValuesCount(**count),
        is_empty=given.get("is_empty"),
        is_null=given.get("is_null"),
        **_place(given),
    )


def _match(given: Plain) -> Any:
    for key, name in _MATCHES.items():
        if key in given:
            return getattr(edge, name)(given[key])
    raise ValueError(f"the embedded engine has no match {'/'.join(given)}")


def _range(given: Plain | None) -> Any:
    if given is None:
        return None
    kind = edge.RangeDateTime if any(isinstance(bound, str) for bound in given.values()) else edge.RangeFloat
    return kind(**given)


def _place(given: Plain) -> dict[str, Any]:
    box, circle, polygon = given.get("geo_bounding_box"), given.get("geo_radius"), given.get("geo_polygon")
    return {
        "geo_bounding_box": box and edge.GeoBoundingBox(_point(box["top_left"]), _point(box["bottom_right"])),
        "geo_radius": circle and edge.GeoRadius(_point(circle["center"]), circle["radius"]),
        "geo_polygon": polygon
        and edge.GeoPolygon(_line(polygon["exterior"]), [_line(line) for line in polygon.get("interiors") or []]),
    }


def _line(given: Plain) -> list[edge.GeoPoint]:
    return [_point(point) for point in given["points"]]


def _point(given: Plain) -> edge.GeoPoint:
    return edge.GeoPoint(given["lon"], given["lat"])
