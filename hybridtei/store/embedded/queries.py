"""Filters in the words of the embedded engine, from their JSON. Runs in the owner process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import qdrant_edge as edge

from hybridtei.store.embedded.conversions import Plain, member, optional, vector_of

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
    """The engine's filter; None stays None."""
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


_FORMULA_CONDITIONS = frozenset(
    {"key", "is_empty", "is_null", "has_id", "has_vector", "nested", "must", "should", "must_not", "min_should"}
)


def expression_of(given: Any) -> Any:
    """A number, a variable, a condition (1 or 0), or one operation on expressions. Raises ValueError for those it lacks."""
    if isinstance(given, int | float):
        return edge.Expression.Constant(float(given))
    if isinstance(given, str):
        return edge.Expression.Variable(given)
    if _FORMULA_CONDITIONS & set(given):
        return edge.Expression.Condition(condition_of(given))
    ((kind, body),) = given.items()
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
    "geo_distance": lambda body: edge.Expression.GeoDistance(
        edge.GeoPoint(body["origin"]["lon"], body["origin"]["lat"]), body["to"]
    ),
    "datetime": edge.Expression.Datetime,
    "datetime_key": edge.Expression.DatetimeKey,
}


DEFAULT_LIMIT, DEFAULT_K, DEFAULT_DIVERSITY = 10, 2, 0.5


def request_of(request: Plain) -> edge.QueryRequest:
    """A whole query. `shard_key` and `lookup_from` mean nothing here."""
    _refuse(request, "lookup_from", "shard_key")
    return edge.QueryRequest(
        limit=request.get("limit", DEFAULT_LIMIT),
        offset=request.get("offset") or 0,
        query=_query(request),
        prefetches=_prefetches(request),
        filter=filter_of(request.get("filter")),
        score_threshold=request.get("score_threshold"),
        params=_params(request.get("params")),
        with_payload=payload_selector(request.get("with_payload")),
        with_vector=request.get("with_vector", False),
    )


def payload_selector(wanted: Any) -> Any:
    """True, False, a list of keys, or keys to include or exclude."""
    if isinstance(wanted, Mapping):
        if "include" in wanted:
            return edge.PayloadSelector.Include(list(wanted["include"]))
        return edge.PayloadSelector.Exclude(list(wanted["exclude"]))
    return False if wanted is None else wanted


def _prefetches(request: Plain) -> list[edge.Prefetch]:
    given = request.get("prefetch") or []
    return [_prefetch(prefetch) for prefetch in ([given] if isinstance(given, Mapping) else given)]


def _prefetch(request: Plain) -> edge.Prefetch:
    _refuse(request, "lookup_from")
    return edge.Prefetch(
        limit=request.get("limit", DEFAULT_LIMIT),
        query=_query(request),
        prefetches=_prefetches(request),
        params=_params(request.get("params")),
        filter=filter_of(request.get("filter")),
        score_threshold=request.get("score_threshold"),
    )


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
    "fusion": lambda query, _: edge.Fusion.Dbsf() if query["fusion"] == "dbsf" else edge.Fusion.Rrf(DEFAULT_K),
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
