"""Requests drawn from the routes' own schemas, each with a field or two made as large as a body may
be.

Routes come from the server's OpenAPI document, which includes new routes. Half of the requests
begin with its example, since a schema does not tell which of its optional fields belong together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from conformance.amplify.request import Request, encode, route_of
from conformance.fuzz.bodies import CONDITIONS, NAMES, Bodies

# Bytes that the default `--payload-limit` allows, without names and braces
BODY_BYTES = 1_990_000
SIZES = (BODY_BYTES, BODY_BYTES, 1_000_000, 400_000, 100_000, 20_000, 4_000, 500)
UNITS = ("a", "a ", ". ", "hybrid search ", "\\u0000", "é", "🙂", "\\n", "中", "%2e", "0.1, ")
COUNTS = (2, 32, 33, 512, 1000, 1001, 10_000, 10_001, 100_000)
NUMBERS = (0, 1, 2, 32, 1000, 10_000, 100_000, 2**31, 2**32 - 1, 2**63 - 1, -1, 1e308)
DEEPEST = 5
HEAD_BYTES = 60_000
Step = str | int


# Long values of a filter
LONG: tuple[Any, ...] = (
    {"key": "text", "match": {"text_any": {"*text": ["hybrid ", 40]}}},
    {"key": "text", "match": {"any": {"*list": ["a", 40]}}},
)


@dataclass(frozen=True)
class Route:
    """A method, a path with its parts filled in, and the schema of its body."""

    method: str
    path: str
    schema: Mapping[str, Any] | None


class Shapes:
    """Draws requests. `document`: the OpenAPI document; `alias`: below which the model's routes
    are, too."""

    def __init__(self, document: Mapping[str, Any], alias: str, draw: Random) -> None:
        self._bodies = Bodies(document)
        self.routes = [
            Route(method, path, self._bodies.media.get(path, {}).get("schema"))
            for method, path in self._bodies.operations
        ]
        self._alias = alias
        self._draw = draw
        self._sites = {
            route.path: [*self._fields(route.schema)]
            for route in self.routes
            if route.schema is not None
        }

    def fresh(self, route: Route) -> Request:
        """Return a large request for a route."""
        if route.schema is None:
            return self._bodiless(route)
        body = self._base(route)
        number = self._draw.choice((1, 1, 2, 2, 3))
        size = self._draw.choice(SIZES) // number
        for _ in range(number):
            body = self._grown_somewhere(route, body, size)
        return self._dressed(Request(route.method, route.path, fitted(body)))

    def changed(self, request: Request) -> Request:
        """Return a variant of a request."""
        route = next((one for one in self.routes if one.path == route_of(request)), None)
        roll = self._draw.random()
        if route is None or route.schema is None:
            return request if route is None else self._bodiless(route)
        if roll < 0.4:
            return replace(
                request,
                body=fitted(
                    self._resized(request.body, self._draw.choice((0.5, 0.8, 1.2, 2.0, 4.0)))
                ),
            )
        if roll < 0.8:
            size = self._draw.choice((50, 500, 20_000))
            return replace(request, body=fitted(self._grown_somewhere(route, request.body, size)))
        return self._dressed(replace(request, copies=1, chunk=0))

    def _bodiless(self, route: Route) -> Request:
        long = [
            self._draw.choice(("a", "%2e", "/", "a=b&", ", ")),
            self._draw.choice((1, 1000, HEAD_BYTES // 4)),
        ]
        if self._draw.random() < 0.5:
            return Request(
                route.method, route.path, query=long, copies=self._draw.choice((1, 1, 64))
            )
        name = self._draw.choice(("accept", "accept-encoding", "authorization", "origin", "x"))
        return Request(route.method, route.path, headers={name: long})

    def _dressed(self, request: Request) -> Request:
        """Return the request many times, in chunks or below its alias."""
        ways: tuple[dict[str, Any], ...] = (
            {"copies": self._draw.choice((2, 8, 17))},
            {"chunk": self._draw.choice((1, 100, 65_536))},
            {"path": f"/m/{self._alias}{request.path.removeprefix(f'/m/{self._alias}')}"},
        )
        way = self._draw.choice(ways) if self._draw.random() < 0.3 else {}
        return replace(request, **way)

    def _base(self, route: Route) -> Any:
        if self._draw.random() < 0.5:
            return self._bodies.drawn(route.path, self._draw)
        return self._bodies.value(route.schema or {}, self._draw)

    def _grown_somewhere(self, route: Route, body: Any, size: int) -> Any:
        sites = self._sites[route.path]
        if not sites or self._draw.random() < 0.02:
            return self._anything(size)
        path, schema = self._draw.choice(sites)
        return placed(body, path, self._grown(schema, size, path))

    def _fields(
        self, schema: Mapping[str, Any], path: tuple[Step, ...] = ()
    ) -> Iterator[tuple[tuple[Step, ...], Mapping[str, Any]]]:
        """Yield every path of a body, and the schemas of its values."""
        for variant in self._bodies.variants(schema):
            if path and variant.get("type") != "null":
                yield path, variant
            if len(path) < DEEPEST:
                for name, field in variant.get("properties", {}).items():
                    yield from self._fields(field, (*path, name))
                # False: a tuple, whose items are `prefixItems`
                if variant.get("items"):
                    yield from self._fields(variant["items"], (*path, 0))

    def _grown(self, schema: Mapping[str, Any], size: int, path: tuple[Step, ...] = ()) -> Any:
        """Return a large value that a schema allows, or one slightly above."""
        kind = schema.get("type")
        makers: dict[Any, Callable[[], Any]] = {
            "string": lambda: self._string(schema, size, path),
            "integer": lambda: self._number(schema),
            "number": lambda: self._number(schema),
            "boolean": lambda: self._draw.random() < 0.7,
            "array": lambda: self._list(schema, size),
        }
        if self._draw.random() < 0.05:
            return self._anything(size)
        if path and path[-1] == "filter":
            return self._filter(size)
        if "enum" in schema:
            return self._draw.choice(schema["enum"])
        if kind == "object" and schema.get("properties"):
            return self._object(schema, size)
        # Of any keys, such as a payload
        if kind == "object" and self._draw.random() < 0.7:
            return {"a": self._anything(size)}
        return makers.get(kind, lambda: self._anything(size))()

    def _filter(self, size: int) -> Any:
        condition = self._draw.choice((*CONDITIONS, *LONG))
        most = min(size, 99_000) // len(encode(condition))
        return {
            self._draw.choice(("must", "should", "must_not")): {
                "*list": [condition, self._draw.choice((1, 50, 100, most))]
            }
        }

    def _string(self, schema: Mapping[str, Any], size: int, path: tuple[Step, ...]) -> Any:
        if path and path[-1] in NAMES and self._draw.random() < 0.7:
            return NAMES[str(path[-1])]
        return self._text(min(size, schema.get("maxLength", size) + self._draw.choice((0, 1))))

    def _number(self, schema: Mapping[str, Any]) -> Any:
        edges = [schema[edge] for edge in ("minimum", "maximum") if edge in schema]
        return self._draw.choice((*NUMBERS, *edges * 4))

    def _text(self, size: int) -> Any:
        unit = self._draw.choice(UNITS)
        return {"*text": [unit, max(size // len(unit.encode()), 1)]}

    def _list(self, schema: Mapping[str, Any], size: int) -> Any:
        items = self._draw.choice(self._bodies.variants(schema.get("items") or {}))
        # Up to the room that is left
        if self._draw.random() < 0.5:
            item = (
                self._bodies.value(items, self._draw)
                if items
                else self._draw.choice(({"text": "a"}, 0, {}, "a"))
            )
            return {"*list": [item, max(size // (len(repr(item)) + 1), 1)]}
        count = self._draw.choice((*COUNTS, *[schema.get("maxItems")] * ("maxItems" in schema)))
        each = max(size // count - 3, 1)
        return {"*list": [self._grown(items, each) if items else {"text": self._text(each)}, count]}

    def _object(self, schema: Mapping[str, Any], size: int) -> Any:
        made = self._bodies.value(schema, self._draw)
        name, field = self._draw.choice([*schema["properties"].items()])
        return {**made, name: self._grown(self._draw.choice(self._bodies.variants(field)), size)}

    def _anything(self, size: int) -> Any:
        """A value of any type."""
        makers = (
            lambda: self._text(size),
            lambda: {
                "*list": [self._draw.choice((0, "", {}, [], None, 1.5, "a", ["a"])), size // 4]
            },
            lambda: {"*list": [{self._draw.choice(("a", "\0", "text")): 1}, size // 15]},
            lambda: {"*keys": [self._draw.choice((0, "a", [], {})), size // 10]},
            lambda: {"*same": [self._draw.choice(("a", "inputs", "\\u0061")), 1, size // 12]},
            lambda: {"*deep": max(min(size // 2, self._draw.choice((100, 1000, 900_000))), 1)},
            lambda: {"*list": [{"*list": [0, 100]}, size // 202]},
        )
        return self._draw.choice(makers)()

    def _resized(self, body: Any, factor: float) -> Any:
        """The same request with another size of one large part."""
        marks = [*marked(body)]
        if not marks:
            return body
        path, mark = self._draw.choice(marks)
        ((key, given),) = mark.items()
        *rest, times = given if isinstance(given, list) else [given]
        times = max(int(times * factor), 1)
        return placed(body, path, {key: [*rest, times] if rest else times})


def placed(body: Any, path: tuple[Step, ...], value: Any) -> Any:
    """`body` with `value` at `path`. Missing containers on the path are created, and other values
    there replaced."""
    if not path:
        return value
    step, *rest = path
    if isinstance(step, int):
        items = body if isinstance(body, list) else []
        return [
            placed(items[step] if step < len(items) else None, tuple(rest), value),
            *items[step + 1 :],
        ]
    fields = body if isinstance(body, dict) and not any(key.startswith("*") for key in body) else {}
    return {**fields, step: placed(fields.get(step), tuple(rest), value)}


def fitted(body: Any) -> Any:
    """The same with less of its large parts, if it would be refused for its size."""
    size = len(encode(body))
    for path, mark in [*marked(body)] if size > BODY_BYTES else ():
        ((key, given),) = mark.items()
        *rest, times = given if isinstance(given, list) else [given]
        fewer = max(times * (BODY_BYTES - 1_000) // size, 1)
        body = placed(body, path, {key: [*rest, fewer] if rest else fewer})
    return body


def marked(
    body: Any, path: tuple[Step, ...] = ()
) -> Iterator[tuple[tuple[Step, ...], dict[str, Any]]]:
    """The places of a body's large parts, and the parts."""
    if isinstance(body, dict):
        for key, value in body.items():
            if key.startswith("*"):
                yield path, body
            else:
                yield from marked(value, (*path, key))
    elif isinstance(body, list):
        for place, value in enumerate(body):
            yield from marked(value, (*path, place))
