"""Filters, formulas and queries as the embedded engine's types, from their JSON. Runs in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import qdrant_edge as edge

from hybridtei.store.embedded_conversions import Plain, member, optional, vector_of

_FILTER_KEYS = frozenset({"must", "should", "must_not", "min_should"})
_MATCHES = ("value", "text", "text_any", "phrase", "prefix", "substring", "any", "except")


def filter_of(plain: Plain | None) -> Any:
    """The engine's filter; None stays None."""
    if plain is None:
        return None
    least = plain.get("min_should")
    return edge.Filter(
        must=_conditions(plain.get("must")),
        should=_conditions(plain.get("should")),
        must_not=_conditions(plain.get("must_not")),
        min_should=least and edge.MinShould(_conditions(least["conditions"]) or [], least["min_count"]),
    )


def _conditions(plain: Any) -> list[Any] | None:
    if plain is None:
        return None
    return [condition_of(condition) for condition in ([plain] if isinstance(plain, Mapping) else plain)]


def condition_of(plain: Plain) -> Any:
    """One condition, or a filter inside a filter. Raises ValueError for kinds the engine lacks."""
    if "key" in plain:  # first, since a field's condition may also say `is_empty`
        return _field(plain)
    for key, make in _CONDITIONS.items():
        if key in plain:
            return make(plain[key])
    if set(plain) <= _FILTER_KEYS:
        return filter_of(plain)
    raise ValueError(f"the embedded engine has no condition {'/'.join(plain)}")


_CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "is_empty": lambda body: edge.IsEmptyCondition(body["key"]),
    "is_null": lambda body: edge.IsNullCondition(body["key"]),
    "has_id": lambda body: edge.HasIdCondition(set(body)),
    "has_vector": edge.HasVectorCondition,
    "nested": lambda body: edge.NestedCondition(body["key"], filter_of(body["filter"])),
}


def _field(condition: Plain) -> edge.FieldCondition:
    match, count = condition.get("match"), condition.get("values_count")
    return edge.FieldCondition(
        key=condition["key"],
        match=match and _match(match),
        range=_range(condition.get("range")),
        values_count=None if count is None else edge.ValuesCount(**count),
        is_empty=condition.get("is_empty"),
        is_null=condition.get("is_null"),
        **_geo(condition),
    )


def _match(match: Plain) -> Any:
    for key in _MATCHES:
        if key in match:
            value = match[key]
            if isinstance(value, bool):  # the engine reads Python's bool as the integer 1 or 0, numpy's as what it is
                value = np.bool_(value)
            elif isinstance(value, list) and any(isinstance(one, bool) for one in value):
                raise ValueError(f"the embedded engine has no true or false in match {key}")
            return getattr(edge, f"Match{key.title().replace('_', '')}")(value)
    raise ValueError(f"the embedded engine has no match {'/'.join(match)}")


def _range(bounds: Plain | None) -> Any:
    if bounds is None:
        return None
    kind = edge.RangeDateTime if any(isinstance(bound, str) for bound in bounds.values()) else edge.RangeFloat
    return kind(**bounds)


def _geo(condition: Plain) -> dict[str, Any]:
    box, circle, polygon = condition.get("geo_bounding_box"), condition.get("geo_radius"), condition.get("geo_polygon")
    return {
        "geo_bounding_box": box and edge.GeoBoundingBox(_point(box["top_left"]), _point(box["bottom_right"])),
        "geo_radius": circle and edge.GeoRadius(_point(circle["center"]), circle["radius"]),
        "geo_polygon": polygon
        and edge.GeoPolygon(_line(polygon["exterior"]), [_line(line) for line in polygon.get("interiors") or []]),
    }


def _line(line: Plain) -> list[edge.GeoPoint]:
    return [_point(point) for point in line["points"]]


def _point(point: Plain) -> edge.GeoPoint:
    return edge.GeoPoint(point["lon"], point["lat"])


_FORMULA_CONDITIONS = _FILTER_KEYS | {"key", *_CONDITIONS}


def expression_of(plain: Any) -> Any:
    """A number, a variable, a condition (1 or 0), or one operation on expressions. Raises ValueError for others."""
    if isinstance(plain, int | float):
        return edge.Expression.Constant(float(plain))
    if isinstance(plain, str):
        return edge.Expression.Variable(plain)
    if _FORMULA_CONDITIONS & set(plain):
        return edge.Expression.Condition(condition_of(plain))
    ((kind, body),) = plain.items()
    if kind not in _OPERATIONS:
        raise ValueError(f"the embedded engine has no {kind!r} in formulas")
    return _OPERATIONS[kind](body)


def _of_many(name: str) -> Callable[[Any], Any]:
    return lambda body: getattr(edge.Expression, name)([expression_of(part) for part in body])


def _of_one(name: str) -> Callable[[Any], Any]:
    return lambda body: getattr(edge.Expression, name)(expression_of(body))


def _decay(name: str) -> Callable[[Any], Any]:
    def make(body: Any) -> Any:
        target = body.get("target")
        return edge.Expression.Decay(
            getattr(edge.DecayKind, name),
            expression_of(body["x"]),
            None if target is None else expression_of(target),
            body.get("midpoint"),
            body.get("scale"),
        )

    return make


_OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{name.lower(): _of_many(name) for name in ("Mult", "Sum", "Max", "Min")},
    **{name.lower(): _of_one(name) for name in ("Neg", "Sqrt", "Exp", "Log10", "Ln", "Acosh", "Abs")},
    **{f"{name.lower()}_decay": _decay(name) for name in ("Lin", "Exp", "Gauss")},
    "div": lambda body: edge.Expression.Div(
        expression_of(body["left"]), expression_of(body["right"]), body.get("by_zero_default")
    ),
    "pow": lambda body: edge.Expression.Pow(expression_of(body["base"]), expression_of(body["exponent"])),
    "geo_distance": lambda body: edge.Expression.GeoDistance(_point(body["origin"]), body["to"]),
    "datetime": edge.Expression.Datetime,
    "datetime_key": edge.Expression.DatetimeKey,
}


DEFAULT_LIMIT, DEFAULT_K, DEFAULT_DIVERSITY = 10, 2, 0.5


def request_of(request: Plain) -> edge.QueryRequest:
    """A whole query. Raises ValueError for `shard_key` and `lookup_from`."""
    _refuse(request, "shard_key")
    return edge.QueryRequest(
        offset=request.get("offset") or 0,
        with_payload=payload_selector(request.get("with_payload")),
        with_vector=request.get("with_vector", False),
        **_prefetch_fields(request),
    )


def payload_selector(selector: Any) -> Any:
    """True, False, a list of keys, or keys to include or exclude."""
    if isinstance(selector, Mapping):
        if "include" in selector:
            return edge.PayloadSelector.Include(list(selector["include"]))
        return edge.PayloadSelector.Exclude(list(selector["exclude"]))
    return False if selector is None else selector


def _prefetch_fields(request: Plain) -> dict[str, Any]:
    """The fields that a query and its prefetches share."""
    _refuse(request, "lookup_from")
    prefetch = request.get("prefetch") or []
    below = [prefetch] if isinstance(prefetch, Mapping) else prefetch
    return {
        "limit": request.get("limit", DEFAULT_LIMIT),
        "query": _query(request),
        "prefetches": [edge.Prefetch(**_prefetch_fields(one)) for one in below],
        "params": _params(request.get("params")),
        "filter": filter_of(request.get("filter")),
        "score_threshold": request.get("score_threshold"),
    }


def _refuse(request: Plain, *fields: str) -> None:
    for field in fields:
        if request.get(field) is not None:
            raise ValueError(f"`{field}` means nothing to the embedded engine")


def _query(request: Plain) -> Any:
    query = request.get("query")
    if query is None:
        return None
    if not isinstance(query, Mapping) or "indices" in query:
        return edge.Query.Nearest(_input(query), request.get("using"))
    for key, make in _QUERIES.items():
        if key in query:
            return make(query, request)
    raise ValueError(f"a query of the kind {'/'.join(query)} is not served by the embedded engine")


def _input(vector: Any) -> Any:
    if isinstance(vector, int | str):
        raise ValueError("a query by a point's id is not served by the embedded engine: give its vector")
    return vector_of(vector)


def _nearest(query: Plain, request: Plain) -> Any:
    vector, mmr, using = _input(query["nearest"]), query.get("mmr"), request.get("using")
    if mmr is None:
        return edge.Query.Nearest(vector, using)
    limit = request.get("limit", DEFAULT_LIMIT)
    return edge.Mmr(vector, 1 - mmr.get("diversity", DEFAULT_DIVERSITY), mmr.get("candidates_limit", limit), using)


_QUERIES: dict[str, Callable[[Plain, Plain], Any]] = {
    "nearest": _nearest,
    "fusion": lambda query, _: edge.Fusion.Rrf(DEFAULT_K),
    "rrf": lambda query, _: edge.Fusion.Rrf(query["rrf"].get("k", DEFAULT_K), query["rrf"].get("weights")),
    "formula": lambda query, _: edge.Formula(expression_of(query["formula"]), query.get("defaults") or {}),
    "order_by": lambda query, _: order_of(query["order_by"]),
    "sample": lambda query, _: member(edge.Sample, query["sample"]),
}


def order_of(order: Any) -> edge.OrderBy:
    """A key, or a key with direction and start."""
    if isinstance(order, str):
        return edge.OrderBy(order)
    return edge.OrderBy(order["key"], optional(edge.Direction, order.get("direction")), order.get("start_from"))


def _params(params: Plain | None) -> Any:
    if params is None:
        return None
    quantization, acorn = params.get("quantization"), params.get("acorn")
    return edge.SearchParams(
        hnsw_ef=params.get("hnsw_ef"),
        exact=params.get("exact", False),
        quantization=quantization
        and edge.QuantizationSearchParams(
            ignore=quantization.get("ignore", False),
            rescore=quantization.get("rescore"),
            oversampling=quantization.get("oversampling"),
        ),
        indexed_only=params.get("indexed_only", False),
        acorn=acorn and edge.AcornSearchParams(acorn.get("enable", False), acorn.get("max_selectivity")),
        idf=_idf(params.get("idf")),
    )


def _idf(params: Any) -> Any:
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise ValueError(f"`params.idf` {params!r} is not served by the embedded engine")
    return edge.IdfParams(corpus=filter_of(params.get("corpus")))
