"""Formulas in the words of the embedded engine, from their JSON. Runs in the owner process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import qdrant_edge as edge

from hybridtei.store.embedded.filters import condition_of

_CONDITIONS = frozenset(
    {"key", "is_empty", "is_null", "has_id", "has_vector", "nested", "must", "should", "must_not", "min_should"}
)


def expression_of(given: Any) -> Any:
    """A number, a variable, a condition (1 or 0), or one operation on expressions. Raises ValueError for those it lacks."""
    if isinstance(given, int | float):
        return edge.Expression.Constant(float(given))
    if isinstance(given, str):
        return edge.Expression.Variable(given)
    if _CONDITIONS & set(given):
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
