"""OpenAPI's document, from the table of routes and their structs; and bounds that are no types of the structs.

msgspec would refuse empty texts and mixed lists in words of its own, and TEI's clients know TEI's: handlers refuse these, and
the document says so. What JSON Schema cannot say is not here: that an id is in a vocabulary, that two lists are of one length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from hybridtei import __version__
from hybridtei.server.api.qdrant_inference import InferenceError
from hybridtei.server.routing import ErrorResponse, ListedErrorResponse, OpenAICompatErrorResponse, Route

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
PARAMETERS = re.compile(r"\{(\w+):\w+\}")  # of a path: name and kind


def _of(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields]}


TEXT, CODE = {"type": "string"}, {"type": "integer"}
KIND = {"enum": ["NotFound", "Unauthorized"]}  # not of TEI's kinds of errors
OTHERS = {
    ErrorResponse: _of(error=TEXT, error_type=KIND),
    InferenceError: _of(error=TEXT),
    OpenAICompatErrorResponse: _of(message=TEXT, code=CODE, type=KIND),
    ListedErrorResponse: _of(message=TEXT, code=CODE, type=KIND, detail={"type": "array"}),
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


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of some routes as a plain dictionary. TEI's schemas go by TEI's names."""
    routes = [route for route in routes if route.summary]
    named = [kind for route in routes for kind in (route.request, route.response) if kind]
    named += [route.error for route in routes if route.request]
    types = [kind for one in named for kind in (one if isinstance(one, tuple) else (one,))]
    schemas, components = msgspec.json.schema_components(types, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {_key(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for route in routes:
        path = PARAMETERS.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of, components)
    narrow(components)
    _name_fields(components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Text Embeddings Inference",
            "description": "hybridtei: TEI's API, and dense, sparse and multi-vectors from one forward pass.",
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
            "version": __version__,
        },
        "paths": paths,
        "components": {"schemas": components},
        "tags": [{"name": "Text Embeddings Inference"}],
    }


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


def _operation(route: Route, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": route.summary}}
    if route.response is not None:
        schema = _schema(route.response, schema_of)
        if route.response_name is not None:
            components[route.response_name], schema = schema, {"$ref": REFERENCE + route.response_name}
        answers["200"]["content"] = _json(schema)
    described: dict[str, Any] = {"tags": ["Text Embeddings Inference"], "summary": route.summary, "responses": answers}
    if route.request is not None:
        described["requestBody"] = {"required": True, "content": _json(_schema(route.request, schema_of))}
        for status, meaning in ERRORS.items():
            schema = OTHERS[route.error] if status == "404" else _schema(route.error, schema_of)
            answers[status] = {"description": meaning, "content": _json(schema)}
        answers["401"] = {"description": NO_KEY} | ({} if route.is_tei else {"content": _json(OTHERS[route.error])})
        refused = _json(_schema(route.error, schema_of)) if route.error.takes_body_errors else PLAIN_TEXT
        for status, meaning in BODY_ERRORS.items():
            known = answers.setdefault(status, {"description": meaning, "content": {}})
            known["content"] = {**known["content"], **refused}
    if names := PARAMETERS.findall(route.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _schema(kind: Any, schema_of: dict[str, Any]) -> Any:
    if not isinstance(kind, tuple):
        return schema_of[_key(kind)]
    schemas = [schema_of[_key(one)] for one in kind]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _key(kind: Any) -> str:
    return repr(kind)


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
# Of each struct: forms of which a request has one at least.
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
