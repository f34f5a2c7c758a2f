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
from hybridtei.server.answers import Answer, Lines
from hybridtei.server.api.tei import InputType
from hybridtei.server.routing import ENDPOINT, Endpoint

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
    handlers = documented(app)
    kinds = [
        kind
        for _, handler in handlers
        for kind in (*_requests(handler), *answers_of(handler), handler.opt[ENDPOINT].error)
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths = {}
    for path, handler in handlers:
        operation = _operation(path, handler, schema_of)
        if (name := TEI_RESPONSES.get(path)) is not None:
            content = operation["responses"]["200"]["content"]["application/json"]
            components[name], content["schema"] = content["schema"], {"$ref": REFERENCE + name}
        paths[path] = {"post" if "POST" in handler.http_methods else "get": operation}
    _name_fields(components)
    return {
        "openapi": "3.1.0",
        "info": INFO,
        "tags": [{"name": TAG}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(path: str, handler: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    endpoint, requests, answers = handler.opt[ENDPOINT], _requests(handler), answers_of(handler)
    text, names = cleandoc(handler.fn.__doc__), re.findall(r"{(\w+)}", path)
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
    if handler.parsed_return_field.is_subclass_of(Lines):
        answer["content"] = JSON_LINES
    if requests or endpoint.takes_lines:
        content = _json(_one_of(requests, schema_of)) if requests else JSON_LINES
        operation["requestBody"] = {"required": True, "content": content}
    if requests or endpoint.needs_store:
        operation["responses"] |= _errors(endpoint, schema_of)
    return operation


def documented(app: Litestar) -> list[tuple[str, Any]]:
    """(path, handler) of the routes in the document, sorted by path."""
    return [
        (one.path_format, handler)
        for one in sorted(app.routes, key=lambda one: one.path)
        for handler in getattr(one, "route_handlers", ())
        if handler.include_in_schema and ENDPOINT in handler.opt
    ]


def _requests(handler: Any) -> Sequence[Any]:
    """The structs that a handler accepts as a body."""
    field = handler.parsed_data_field
    return () if field is None else _members(field.annotation)


def answers_of(handler: Any) -> Sequence[Any]:
    """The types of a handler's answers."""
    field = handler.parsed_return_field
    return _members(field.args[0]) if field.is_subclass_of(Answer) else ()


def _members(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _name_fields(components: dict[str, Any]) -> None:
    """Replace fields by references to the schemas that TEI names. A field keeps its description and default."""
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


def _errors(endpoint: Endpoint, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Status -> the response's schema."""
    content = _json(schema_of[repr(endpoint.error)])
    of_bodies = content if endpoint.error.takes_body_errors else content | PLAIN_TEXT
    return NO_KEY | {
        status: {"description": meaning, "content": of_bodies if status in OF_BODIES else content}
        for status, meaning in ERRORS.items()
    }


def _one_of(kinds: Sequence[Any], schema_of: dict[str, Any]) -> Any:
    schemas = [schema_of[repr(kind)] for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
