"""The OpenAPI document: Litestar's, with msgspec's schemas of the structs, and bounds that their types do not state.

Our code, not the types, refuses empty texts and mixed lists, because TEI's clients know TEI's messages. `BOUNDS` states this
for the document. JSON Schema cannot state that an id is in a vocabulary, or that two lists have one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from litestar import Litestar, MediaType, Request, Router, route
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import License

from hybridtei import __version__
from hybridtei.server.answer import Answer
from hybridtei.server.api.qdrant_inference import InferenceError
from hybridtei.server.routing import ENDPOINT, Endpoint, ErrorResponse, ListedErrorResponse, OpenAICompatErrorResponse

ERRORS = {
    "400": "Empty input",
    "404": "No such model, or collection",
    "422": "Invalid input",
    "424": "Wrong kind of model, or a failed pass",
    "429": "Overloaded",
    "503": "Not in time, or the vector store is away",
}
NO_KEY = "No key, or one that is not known"
BODY_ERRORS = {
    "400": "No JSON",
    "413": "Too large a body",
    "415": "Not called JSON",
    "422": "JSON of another shape",
}  # plain text
PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}
TAG = "Text Embeddings Inference"


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields]}


TEXT, CODE = {"type": "string"}, {"type": "integer"}
KIND = {"enum": ["NotFound", "Unauthorized"]}  # not of TEI's kinds of errors
OTHER_ERRORS = {  # struct of a route's errors -> schema of the errors whose kind TEI does not have
    ErrorResponse: _object(error=TEXT, error_type=KIND),
    InferenceError: _object(error=TEXT),
    OpenAICompatErrorResponse: _object(message=TEXT, code=CODE, type=KIND),
    ListedErrorResponse: _object(message=TEXT, code=CODE, type=KIND, detail={"type": "array"}),
}
REFERENCE = "#/components/schemas/"
# TEI's names for fields of requests that several share.
REQUESTS_WITH_DIRECTION = ("EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest", "PredictRequest", "RerankRequest")
FIELDS = {
    ("inputs", "EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest"): "Input",
    ("input", "OpenAICompatRequest"): "Input",
    ("inputs", "PredictRequest"): "PredictInput",
    ("inputs", "TokenizeRequest"): "TokenizeInput",
    ("ids", "DecodeRequest"): "InputIds",
    ("encoding_format", "OpenAICompatRequest"): "EncodingFormat",
    ("embedding", "OpenAICompatEmbedding"): "Embedding",
    ("error_type", "ErrorResponse"): "ErrorType",
    ("truncation_direction", *REQUESTS_WITH_DIRECTION): "TruncationDirection",
}


AnyRequest = Request[Any, Any, Any]

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
        """The document as JSON."""
        self._written = self._written or msgspec.json.encode(document(request.app))
        return self._written

    def receive_router(self, router: Router) -> None:
        """Answer HEAD too; the framework answers GET alone."""

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
        render_plugins=[Document(path="/openapi.json", media_type=MediaType.JSON)],
    )


def document(app: Litestar) -> dict[str, Any]:
    """Litestar's document, with msgspec's schemas, their bounds, and each route's errors. TEI's schemas go by TEI's names."""
    handlers = documented(app)
    kinds = [kind for _, handler in handlers for kind in (*_requests(handler), *answers_of(handler))]
    kinds += [handler.opt[ENDPOINT].error for _, handler in handlers]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    whole: dict[str, Any] = app.openapi_schema.to_schema()
    paths = {}
    for path, handler in handlers:
        method = "post" if "POST" in handler.http_methods else "get"
        native = whole["paths"][path][method]
        paths[path] = {method: native | _operation(path, handler, schema_of, components)}
    narrow(components)
    _name_fields(components)
    return {**whole, "paths": paths, "components": {"schemas": components}, "tags": [{"name": TAG}]}


def documented(app: Litestar) -> list[tuple[str, Any]]:
    """(path, handler) of the routes that the document lists, by path."""
    return [
        (one.path_format, handler)
        for one in sorted(app.routes, key=lambda one: one.path)
        for handler in getattr(one, "route_handlers", ())
        if handler.include_in_schema and ENDPOINT in handler.opt
    ]


def _requests(handler: Any) -> Sequence[Any]:
    """The structs of a handler's body."""
    field = handler.parsed_data_field
    return handler.opt[ENDPOINT].reads if field is None else (field.annotation,)


def answers_of(handler: Any) -> Sequence[Any]:
    """The types that a handler's answer may have."""
    field = handler.parsed_return_field
    if not field.is_subclass_of(Answer):
        return ()
    (answer,) = field.args
    return get_args(answer) if get_origin(answer) in (Union, UnionType) else (answer,)


def _name_fields(components: dict[str, Any]) -> None:
    """Fields -> references to schemas of their own, where TEI has these; a field keeps its description and default."""
    for (field, *structs), name in FIELDS.items():
        for struct in structs:
            fields = components[struct]["properties"]
            kept = {key: fields[field].pop(key) for key in ("description", "default") if key in fields[field]}
            components.setdefault(name, fields[field])
            fields[field] = {"$ref": REFERENCE + name, **kept}
    one = {"$ref": f"{REFERENCE}InputType"}
    components["InputType"] = INPUT_TYPE
    components["Input"] = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


def _operation(path: str, handler: Any, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    endpoint: Endpoint = handler.opt[ENDPOINT]
    summary = handler.fn.__doc__
    responses: dict[str, Any] = {"200": {"description": summary}}
    if kinds := answers_of(handler):
        schema = _one_of(kinds, schema_of)
        if (name := TEI_RESPONSES.get(path)) is not None:
            components[name], schema = schema, {"$ref": REFERENCE + name}
        responses["200"]["content"] = _json(schema)
    described = {"tags": [TAG], "summary": summary, "responses": responses}
    if kinds := _requests(handler):
        described["requestBody"] = {"required": True, "content": _json(_one_of(kinds, schema_of))}
    if kinds or endpoint.needs_store:
        responses |= _errors(endpoint, schema_of)
    return described


def _errors(endpoint: Endpoint, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Status -> what is answered."""
    error, other = schema_of[repr(endpoint.error)], OTHER_ERRORS[endpoint.error]
    answers: dict[str, Any] = {
        status: {"description": meaning, "content": _json(other if status == "404" else error)}
        for status, meaning in ERRORS.items()
    }
    answers["401"] = {"description": NO_KEY} | ({} if endpoint.is_tei else {"content": _json(other)})
    refused = _json(error) if endpoint.error.takes_body_errors else PLAIN_TEXT
    for status, meaning in BODY_ERRORS.items():
        known = answers.setdefault(status, {"description": meaning, "content": {}})
        known["content"] = {**known["content"], **refused}
    return answers


def _one_of(kinds: Sequence[Any], schema_of: dict[str, Any]) -> Any:
    schemas = [schema_of[repr(kind)] for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


Schema = dict[str, Any]


def _list_of(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, **bounds}


def _any_of(*kinds: Schema) -> Schema:
    return {"anyOf": [*kinds]}


NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}  # may be empty: part of a pair
FULL_TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS = _list_of(FULL_TEXT)
ONE_OR_MORE = _any_of(FULL_TEXT, TEXTS)
ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
IDS = _list_of(ID)
ONE = _list_of(FULL_TEXT, maxItems=1)
PAIR: Schema = {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2, "contains": FULL_TEXT}
SIDE = _any_of(STRING, _list_of(STRING), NULL)
FULL_SIDE = _any_of(FULL_TEXT, TEXTS)
INPUT_TYPE = _any_of(FULL_TEXT, IDS)
INPUT = _any_of(FULL_TEXT, IDS, _list_of(INPUT_TYPE))
DOCUMENT = _any_of(STRING, {"type": "object", "properties": {"text": STRING}, "required": ["text"]})
DIMENSIONS = _any_of({"type": "integer", "minimum": 1}, NULL)

# (field, structs that have it) -> what it may hold.
BOUNDS: dict[tuple[str, ...], Schema] = {
    ("inputs", "EmbedRequest", "EmbedAllRequest", "EmbedSparseRequest", "EmbedHybridRequest", "EmbedMultivectorRequest"): INPUT,
    ("input", "OpenAICompatRequest"): INPUT,
    ("inputs", "TokenizeRequest"): ONE_OR_MORE,
    ("inputs", "PredictRequest"): _any_of(FULL_TEXT, ONE, PAIR, _list_of(_any_of(ONE, PAIR))),
    ("inputs", "PredictTokensRequest"): _any_of(FULL_TEXT, _list_of(_any_of(FULL_TEXT, TEXTS))),
    ("input", "OllamaEmbedRequest", "ClassifyRequest", "VllmClassifyRequest"): ONE_OR_MORE,
    ("ids", "DecodeRequest"): _any_of(IDS, _list_of(IDS)),
    ("source_sentence", "SimilarityInput"): FULL_TEXT,
    ("sentences", "SimilarityInput"): TEXTS,
    ("texts", "RerankRequest"): _list_of(STRING),
    ("documents", "DocumentsRequest"): _list_of(DOCUMENT),
    ("text", "CohereText"): FULL_TEXT,
    ("type", "CohereText"): {"const": "text"},
    ("content", "CohereInput"): _list_of({"$ref": "#/components/schemas/CohereText"}),
    ("texts", "CohereEmbedRequest"): _any_of(TEXTS, NULL),
    ("inputs", "CohereEmbedRequest"): _any_of(_list_of({"$ref": "#/components/schemas/CohereInput"}), NULL),
    **{(field, "ScoreRequest"): SIDE for field in ("text_1", "text_2", "queries", "documents")},
    ("data", "InferenceInput"): FULL_TEXT,
    ("data_type", "InferenceInput"): {"type": "string", "enum": ["text"]},
    ("query", "SearchRequest"): _any_of(FULL_TEXT, NULL),
    ("queries", "SearchRequest"): _any_of(TEXTS, NULL),
    ("dimensions", "EmbedRequest", "EmbedHybridRequest", "EmbedMultivectorRequest", "OllamaEmbedRequest"): DIMENSIONS,
    ("output_dimension", "CohereEmbedRequest", "OpenAICompatRequest", "ContextualizedRequest"): DIMENSIONS,
    ("inputs", "ContextualizedRequest"): _list_of(TEXTS),
}
ALSO_REQUIRED = {"CohereText": ["text"]}


def _requires(*names: str, **kinds: Schema) -> Schema:
    """A schema that requires fields, not null, and of these kinds."""
    return {"required": [*names], "properties": {**{name: {"not": NULL} for name in names}, **kinds}}


def _pairs(first: str, second: str, first_full: Schema, second_full: Schema) -> list[Schema]:
    """Both fields are there, and a text on one side at least is not empty."""
    return [_requires(first, second, **{first: first_full}), _requires(first, second, **{second: second_full})]


FULL_DOCUMENT = _any_of(FULL_TEXT, {"type": "object", "properties": {"text": FULL_TEXT}, "required": ["text"]})
# Struct -> forms; a request has at least one of them.
ALTERNATIVES = {
    "CohereEmbedRequest": [_requires("texts"), _requires("inputs")],
    "RerankRequest": _pairs("query", "texts", FULL_TEXT, TEXTS),
    "DocumentsRequest": _pairs("query", "documents", FULL_TEXT, _list_of(FULL_DOCUMENT)),
    "ScoreRequest": [
        {**form, "not": _any_of(*(_requires(name) for name in others))}
        for first, second, others in (
            ("text_1", "text_2", ("queries", "documents")),
            ("text_1", "documents", ("queries", "text_2")),
            ("queries", "text_2", ("documents", "text_1")),
            ("queries", "documents", ("text_1", "text_2")),
        )
        for form in _pairs(first, second, FULL_SIDE, FULL_SIDE)
    ],
    "SearchRequest": [
        {**_requires("query"), "not": _requires("queries")},
        {**_requires("queries"), "not": _requires("query")},
    ],
}


def narrow(components: dict[str, Any]) -> None:
    """Put the bounds into the structs' schemas; fields keep their descriptions and defaults."""
    for (field, *structs), bound in BOUNDS.items():
        for name in structs:
            if name in components:
                fields = components[name]["properties"]
                fields[field] = {
                    **{key: fields[field][key] for key in ("description", "default") if key in fields[field]},
                    **bound,
                }
    for name, required in ALSO_REQUIRED.items():
        if name in components:
            components[name]["required"] = [*components[name].get("required", ()), *required]
    for name, alternatives in ALTERNATIVES.items():
        if name in components:
            components[name]["anyOf"] = alternatives
