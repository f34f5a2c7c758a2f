"""The OpenAPI document: the routes, msgspec's schemas of their structs, each route's errors, and TEI's names.

Litestar's own document lacks the bounds of nested types and knows no errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import cleandoc
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from litestar import Litestar

from hybridtei import __version__
from hybridtei.server.api.tei import InputType
from hybridtei.server.routing import BELOW, JSON, ROUTE, Route

TAG = "Text Embeddings Inference"
INFO = {
    "title": TAG,
    "version": __version__,
    "description": "hybridtei: TEI's API, and dense, sparse and multi-vectors from one forward pass.",
    "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
}
ERRORS = {
    "400": "Empty input, or invalid JSON",
    "403": "The key lacks the route's role, or the route needs a key",
    "404": "No such model, or collection",
    "413": "Too large a body",
    "415": "Not called JSON",
    "422": "Invalid input, or JSON of the wrong shape",
    "424": "Wrong kind of model, or a failed pass",
    "429": "Overloaded",
    "503": "Timeout, or the vector store is unavailable",
}
OF_BODIES = ("400", "413", "415", "422")  # plain text, unless the route's clients expect its struct
NO_KEY = {"401": {"description": "No key, or an unknown one"}}
PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}
JSON_LINES = {"application/jsonl": {"schema": {"type": "string"}}}
REFERENCE = "#/components/schemas/"
# TEI's schema names for fields that several requests share.
REQUESTS_WITH_DIRECTION = (
    "EmbedRequest",
    "EmbedAllRequest",
    "EmbedSparseRequest",
    "PredictRequest",
    "RerankRequest",
)
FIELDS = {
    ("inputs", "EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest"): "Input",
    ("inputs", "PredictRequest"): "PredictInput",
    ("inputs", "TokenizeRequest"): "TokenizeInput",
    ("ids", "DecodeRequest"): "InputIds",
    ("encoding_format", "OpenAICompatRequest"): "EncodingFormat",
    ("embedding", "OpenAICompatEmbedding"): "Embedding",
    ("error_type", "ErrorResponse"): "ErrorType",
    ("truncation_direction", *REQUESTS_WITH_DIRECTION): "TruncationDirection",
}
TEI_RESPONSES = {  # TEI's names for answers
    "/embed": "EmbedResponse",
    "/embed_all": "EmbedAllResponse",
    "/embed_sparse": "EmbedSparseResponse",
    "/similarity": "SimilarityResponse",
    "/predict": "PredictResponse",
    "/rerank": "RerankResponse",
    "/tokenize": "TokenizeResponse",
    "/decode": "DecodeResponse",
}


def document(app: Litestar) -> dict[str, Any]:
    """The document of an application's routes."""
    paths_and_routes = documented(app)
    kinds = [
        kind
        for _, route in paths_and_routes
        for kind in (*route.requests, *answers_of(route), route.error)
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths = {}
    for path, route in paths_and_routes:
        operation = _operation(path, route, schema_of)
        if (name := TEI_RESPONSES.get(path)) is not None:
            content = operation["responses"]["200"]["content"]["application/json"]
            components[name], content["schema"] = content["schema"], {"$ref": REFERENCE + name}
        paths[path] = {route.methods[0].lower(): operation}
    _name_fields(components)
    return {
        "openapi": "3.1.0",
        "info": INFO,
        "tags": [{"name": TAG}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(path: str, route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    requests, answers = route.requests, answers_of(route)
    text, names = cleandoc(route.work.__doc__ or ""), re.findall(r"{(\w+)}", path)
    answer: dict[str, Any] = {"description": text}
    operation: dict[str, Any] = {
        "tags": [TAG],
        "operationId": re.sub(r"\W+", "_", path).strip("_"),
        "summary": text.partition(".")[0],
        "description": text,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "responses": {"200": answer},
    }
    if answers:
        answer["content"] = _json(_one_of(answers, schema_of))
    if route.gives != JSON:
        answer["content"] = JSON_LINES
    if requests or route.takes != JSON:
        content = _json(_one_of(requests, schema_of)) if requests else JSON_LINES
        operation["requestBody"] = {"required": True, "content": content}
    if requests or route.source == "store":
        operation["responses"] |= _errors(route, schema_of)
    return operation


def documented(app: Litestar) -> list[tuple[str, Route]]:
    """(path, route) of the routes in the document, sorted by path."""
    return [
        (one.path_format, handler.opt[ROUTE])
        for one in sorted(app.routes, key=lambda one: one.path)
        for handler in getattr(one, "route_handlers", ())
        if ROUTE in handler.opt and handler.opt[ROUTE].in_schema and not one.path.startswith(BELOW)
    ]


def answers_of(route: Route) -> Sequence[Any]:
    """The types of a route's answers."""
    return () if route.answer is None else _members(route.answer)


def _members(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _name_fields(components: dict[str, Any]) -> None:
    """Replace fields by references to the schemas that TEI names. A field keeps its description and
    default."""
    for (field, *structs), name in FIELDS.items():
        for struct in structs:
            fields = components[struct]["properties"]
            kept = {
                key: fields[field].pop(key)
                for key in ("description", "default")
                if key in fields[field]
            }
            components.setdefault(name, fields[field])
            fields[field] = {"$ref": REFERENCE + name, **kept}
    one = {"$ref": f"{REFERENCE}InputType"}
    components["InputType"] = msgspec.json.schema(InputType)
    components["Input"] = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


def _errors(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Status -> the response's schema."""
    content = _json(schema_of[repr(route.error)])
    of_bodies = content if route.error.takes_body_errors else content | PLAIN_TEXT
    return NO_KEY | {
        status: {"description": meaning, "content": of_bodies if status in OF_BODIES else content}
        for status, meaning in ERRORS.items()
    }


def _one_of(kinds: Sequence[Any], schema_of: dict[str, Any]) -> Any:
    schemas = [schema_of[repr(kind)] for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
