"""Bodies of every route, drawn from an OpenAPI document: its examples with other texts and further
fields, and what its schemas allow. Texts are words of the tiny models, and everybody else's."""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from hybridtei.server.app import framework
from hybridtei.server.openapi import document

Schema = Mapping[str, Any]
Maker = Callable[[Random], Any]

WORDS = (
    "baka",
    "bulo",
    "dati",
    "bemo",
    "hybrid",
    "search",
    "Zürich",
    "東京",
    "🙂",
    "naïve",
    "e\u0301",
    "ﷺ",
    "\u200b",
    "x" * 40,
)
LENGTHS = (1, 1, 2, 3, 3, 5, 8, 13, 40, 200)
# What parts of paths and fields of these names are
NAMES = {
    "collection": "docs",
    "name": "docs",
    "identity": "a",
    "data_type": "text",
    "alias": "nobody",
    "model_id": "/nowhere",
}
# Of filters a schema tells nothing; the second is none
CONDITIONS: tuple[Any, ...] = (
    {"key": "text", "match": {"value": "a"}},
    {"key": "text", "match": {"valu": "a"}},
    {"key": "n", "range": {"gte": 0, "lt": 5.5}},
    {
        "must": [
            {
                "nested": {
                    "key": "a",
                    "filter": {"must_not": [{"key": "b", "match": {"value": True}}]},
                }
            }
        ]
    },
    {
        "min_should": {
            "conditions": [{"is_empty": {"key": "a"}}, {"has_id": [1, 2]}],
            "min_count": 1,
        }
    },
)
# Shares of the fields that an example lacks, and of the values that follow from the schema instead
FURTHER, OTHERWISE = 0.1, 0.1


class Draw(Random):
    """`longest`: words in a text, for models that take their time."""

    longest = LENGTHS[-1]


def text(draw: Random) -> str:
    """One to two hundred words."""
    most = getattr(draw, "longest", LENGTHS[-1])
    return " ".join(draw.choices(WORDS, k=min(draw.choice(LENGTHS), most)))


class Bodies:
    """The schemas and examples of a document, by path with its parts filled in."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self.media: dict[str, Mapping[str, Any]] = {}
        self.operations: list[tuple[str, str]] = []
        for template, operations in document["paths"].items():
            path = template
            for name, value in NAMES.items():
                path = path.replace(f"{{{name}}}", value)
            for method, operation in operations.items():
                self.operations.append((method.upper(), path))
                for media in operation.get("requestBody", {}).get("content", {}).values():
                    self.media[path] = media

    def drawn(self, path: str, draw: Random) -> Any:
        """The example of a path with other texts and further fields, or what its schema allows."""
        media = self.media[path]
        if "example" not in media or draw.random() < OTHERWISE:
            return self.value(media["schema"], draw, odd=FURTHER)
        base = varied(media["example"], draw)
        bodies = [one.get("properties", {}) for one in self.variants(media["schema"])]
        bodies = [
            fields for fields in bodies if isinstance(base, dict) and fields.keys() >= {*base}
        ]
        for name, field in draw.choice(bodies).items() if bodies else ():
            if draw.random() < (OTHERWISE if name in base else FURTHER):
                base[name] = self.value(field, draw, name, odd=FURTHER)
        return base

    def variants(self, schema: Schema) -> list[Schema]:
        """The members of a union, without references."""
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        unions = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return [one for part in unions for one in self.variants(part)] if unions else [schema]

    def value(self, schema: Schema, draw: Random, name: str = "", *, odd: float = 0) -> Any:
        """The smallest value that a schema allows. `odd`: chance of each optional field; if it is
        not 0, values may also be null, at their bounds or one beyond."""
        members = [one for one in self.variants(schema) if odd or one.get("type") != "null"]
        schema = draw.choice(members or [{}])
        if odd and name == "filter":
            return {draw.choice(("must", "should", "must_not")): [draw.choice(CONDITIONS)]}
        kind = schema.get("type")
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if kind == "object":
            return {
                key: self.value(field, draw, key, odd=odd)
                for key, field in schema.get("properties", {}).items()
                if key in schema.get("required", ()) or draw.random() < odd
            }
        if kind == "array":
            items = schema.get("prefixItems") or [schema.get("items") or {}] * (
                draw.choice((0, 1, 1, 3)) if odd else 1
            )
            return [self.value(one, draw, name, odd=odd) if one else {"text": "a"} for one in items]
        return _scalar(schema, draw, name) if odd else _smallest(schema, name)


def _scalar(schema: Schema, draw: Random, name: str) -> Any:
    kind = schema.get("type")
    if kind in ("integer", "number"):
        low = schema.get("minimum", 0)
        return draw.choice((low, low + 1, low - 1, 3, schema.get("maximum", 63) + 1))
    if kind == "boolean":
        return draw.random() < 0.5
    return None if kind == "null" else NAMES.get(name) or text(draw)


def _smallest(schema: Schema, name: str) -> Any:
    number = max(schema.get("minimum", 1), 1)
    values = {"integer": number, "number": number, "boolean": False}
    return values.get(schema.get("type", ""), NAMES.get(name, "hybrid search"))


def varied(example: Any, draw: Random, name: str = "") -> Any:
    """An example with other texts, more and fewer of them, and other ids."""
    if isinstance(example, dict):
        return {key: varied(value, draw, key) for key, value in example.items()}
    if isinstance(example, list) and example:
        is_few = len(example) == 1 and " " not in str(example)
        count = 1 if is_few else draw.randint(1, 12)
        return [varied(draw.choice(example), draw) for _ in range(count)]
    if isinstance(example, str) and " " in example:
        return text(draw)
    if isinstance(example, int) and not isinstance(example, bool):
        return draw.randrange(5, 60)
    return NAMES[name] if name == "collection" else example


OURS = Bodies(document(framework()))
MESSAGE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "find", "arguments": {"query": "what is found"}},
}
LOAD = {"model_id": "/nowhere", "alias": "a b", "dtype": "int3", "role": "cook"}
# Paths that the document lacks: those whose bodies they take, or an example
ANYTHING = ("/embed", "/predict", "/rerank", "/predict_tokens", "/similarity", "/v1/rerank")
ALIKE: Mapping[str, tuple[str, ...]] = {
    "/": ANYTHING,
    "/invocations": ANYTHING,
    "/embeddings": ("/v1/embeddings",),
    "/v1/reranking": ("/v1/rerank",),
    "/reranking": ("/v1/rerank",),
    "/collections/%2e%2e%2fx/points": ("/collections/docs/points",),
}
EXAMPLES: Mapping[str, Any] = {
    "/mcp": MESSAGE,
    "/collections/docs/mcp": MESSAGE,
    "/models/load": LOAD,
    "/models/unload": {"model": "classifier "},
}


def _alike(paths: tuple[str, ...], draw: Random) -> Any:
    return OURS.drawn(draw.choice(paths), draw)


def _instances(draw: Random) -> Any:
    return {"instances": [_alike(ANYTHING[:4], draw) for _ in range(draw.randint(1, 5))]}


POSTS: dict[str, Maker] = {
    **{path: partial(OURS.drawn, path) for path in OURS.media},
    **{path: partial(_alike, paths) for path, paths in ALIKE.items()},
    **{path: partial(varied, example) for path, example in EXAMPLES.items()},
    "/vertex": _instances,
}
GETS = (
    *(path for method, path in OURS.operations if method == "GET"),
    "/",
    "/ping",
    "/docs",
    "/docs/",
    "/docs/swagger-ui.css",
    "/api-doc/openapi.json",
    "/page",
    "/page/page.css",
)
