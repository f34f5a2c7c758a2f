"""The OpenAPI document: Litestar's, with msgspec's schemas of the structs, each route's errors, and TEI's names."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from litestar import Litestar, MediaType, Router, route
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import License, Tag

from hybridtei import __version__
from hybridtei.server.answers import Answer, Lines
from hybridtei.server.api.tei import InputType
from hybridtei.server.endpoint import TAG
from hybridtei.server.routing import ENDPOINT, AnyRequest, Endpoint

ERRORS = {
    "400": "Empty input, or no JSON",
    "403": "A key without the role of the route, or none where it needs one",
    "404": "No such model, or collection",
    "413": "Too large a body",
    "415": "Not called JSON",
    "422": "Invalid input, or JSON of another shape",
    "424": "Wrong kind of model, or a failed pass",
    "429": "Overloaded",
    "503": "Not in time, or the vector store is away",
}
OF_BODIES = ("400", "413", "415", "422")  # plain text, unless the route's clients expect its struct
NO_KEY = {"401": {"description": "No key, or one that is not known"}}
PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}
JSON_LINES = {"application/jsonl": {"schema": {"type": "string"}}}
REFERENCE = "#/components/schemas/"
# TEI's schema names for fields that several requests share.
REQUESTS_WITH_DIRECTION = ("EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest", "PredictRequest", "RerankRequest")
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


class Document(JsonRenderPlugin):
    """Serves Litestar's document with our schemas in it."""

    _written = b""

    def render(self, request: AnyRequest, openapi_schema: dict[str, Any]) -> bytes:
        """Return the document as JSON."""
        self._written = self._written or msgspec.json.encode(document(request.app))
        return self._written

    def receive_router(self, router: Router) -> None:
        """Answer HEAD too; Litestar answers only GET."""

        @route("/openapi.json", http_method=["HEAD"], media_type=MediaType.JSON, sync_to_thread=False)
        def head(request: AnyRequest) -> bytes:
            return self.render(request, {})

        router.register(head)


def openapi_config() -> OpenAPIConfig:
    """Litestar's configuration of the document."""
    return OpenAPIConfig(
        "Text Embeddings Inference",
        __version__,
        description="hybridtei: TEI's API, and dense, sparse and multi-vectors from one forward pass.",
        license=License("Apache 2.0", url="https://www.apache.org/licenses/LICENSE-2.0"),
        path="/api-doc",
        use_handler_docstrings=True,
        tags=[Tag(TAG)],
        render_plugins=[Document(path="/openapi.json", media_type=MediaType.JSON)],
    )


def document(app: Litestar) -> dict[str, Any]:
    """Litestar's document, with each route's errors, and with msgspec's schemas, since these include bounds of nested types."""
    handlers = documented(app)
    kinds = [
        kind for _, handler in handlers for kind in (*_requests(handler), *answers_of(handler), handler.opt[ENDPOINT].error)
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    whole: dict[str, Any] = app.openapi_schema.to_schema()
    for path, handler in handlers:
        method = "post" if "POST" in handler.http_methods else "get"
        operation = whole["paths"][path][method]
        whole["paths"][path] = {method: operation}  # without HEAD
        operation["responses"] = {"200": {"description": operation["description"]}}
        if answers := answers_of(handler):
            schema = _one_of(answers, schema_of)
            if (name := TEI_RESPONSES.get(path)) is not None:
                components[name], schema = schema, {"$ref": REFERENCE + name}
            operation["responses"]["200"]["content"] = _json(schema)
        if requests := _requests(handler):
            operation["requestBody"] = {"required": True, "content": _json(_one_of(requests, schema_of))}
        if handler.opt[ENDPOINT].takes_lines:
            operation["requestBody"] = {"required": True, "content": JSON_LINES}
        if handler.parsed_return_field.is_subclass_of(Lines):
            operation["responses"]["200"]["content"] = JSON_LINES
        if requests or handler.opt[ENDPOINT].needs_store:
            operation["responses"] |= _errors(handler.opt[ENDPOINT], schema_of)
    _name_fields(components)
    return {**whole, "components": {"schemas": components}}


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
            kept = {key: fields[field].pop(key) for key in ("description", "default") if key in fields[field]}
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
