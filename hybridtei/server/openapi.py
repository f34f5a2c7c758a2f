"""The OpenAPI document: the routes, msgspec's schemas of their structs, each route's errors, and
TEI's names.

Litestar's own document lacks the bounds of nested types and knows no errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from litestar import Litestar

from hybridtei import __version__
from hybridtei.server.api.tei import InputType
from hybridtei.server.routing import BELOW, JSON, ROUTE, Route
from hybridtei.server.wires import ClientsErrorResponse, VoyageErrorResponse

INFO = {
    "title": "hybridtei",
    "version": __version__,
    "description": "TEI's API, and dense, sparse and multi-vectors from one forward pass.",
    "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
}
# Of the document of TEI's routes alone, as TEI writes it: its title, and the one tag
TEI_TITLE = "Text Embeddings Inference"
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
# Plain text, unless the route's clients expect its struct
OF_BODIES = ("400", "413", "415", "422")
NO_KEY = {"401": {"description": "No key, or an unknown one"}}
TEXT = {"type": "string"}
PLAIN_TEXT = {"text/plain": {"schema": TEXT}}
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
# TEI's names for answers
TEI_RESPONSES = {
    "/embed": "EmbedResponse",
    "/embed_all": "EmbedAllResponse",
    "/embed_sparse": "EmbedSparseResponse",
    "/similarity": "SimilarityResponse",
    "/predict": "PredictResponse",
    "/rerank": "RerankResponse",
    "/tokenize": "TokenizeResponse",
    "/decode": "DecodeResponse",
}


# The collection of the examples
COLLECTION = "notes"
TEXTS = ["hybrid search", "a search by words and meaning"]
QUERY = "how fast can a jaguar run"
DOCUMENTS = ["The jaguar, a big cat, can run 80 km/h.", "How to run fast: a plan for beginners."]
# A collection of another schema, as `/collections/{name}/export` writes it
EXPORT = (
    '{"hybridtei":"0.4.0","collection":"imported","schema":'
    '{"vectors":{"dense":{"size":2,"distance":"Cosine"}},"sparse":{},"metadata":{}}}\n'
    '{"id":7,"payload":{"text":"hybrid search"},"vectors":{"dense":[0.6,0.8]}}\n'
    '{"points":1}\n'
)
# API -> path -> a body to try; None: the route takes none. Every documented path is here. The
# search finds what the example of `/collections/{name}/points` stores.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "TEI": {
        "/embed": {"inputs": TEXTS},
        "/embed_all": {"inputs": TEXTS},
        "/embed_sparse": {"inputs": TEXTS},
        "/similarity": {"inputs": {"source_sentence": QUERY, "sentences": DOCUMENTS}},
        "/rerank": {"query": QUERY, "texts": DOCUMENTS},
        "/predict": {"inputs": "I like you."},
        "/tokenize": {"inputs": TEXTS},
        "/decode": {"ids": [[1, 2, 3]]},
    },
    "Hybrid outputs": {
        "/embed_hybrid": {"inputs": TEXTS, "outputs": ["dense", "sparse", "multivector"]},
        "/embed_multivector": {"inputs": TEXTS},
        "/predict_tokens": {"inputs": ["Ada lives in London."]},
    },
    "OpenAI, Jina, Voyage": {
        "/v1/embeddings": {"input": TEXTS},
        "/v1/contextualizedembeddings": {"inputs": [TEXTS, DOCUMENTS]},
        "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS},
    },
    "Cohere": {
        "/v1/embed": {"texts": TEXTS, "input_type": "search_document"},
        "/v2/embed": {
            "texts": TEXTS,
            "input_type": "search_document",
            "embedding_types": ["float"],
        },
        "/v2/rerank": {"query": QUERY, "documents": DOCUMENTS},
    },
    "Ollama": {
        "/api/embed": {"input": TEXTS},
        "/api/embeddings": {"prompt": QUERY},
        "/api/ps": None,
        "/api/pull": {},
        "/api/show": {},
        "/api/tags": None,
        "/api/version": None,
    },
    "infinity, vLLM": {
        "/classify": {"input": ["I like you."]},
        "/v1/classify": {"input": ["I like you."]},
        "/score": {"text_1": QUERY, "text_2": DOCUMENTS},
        "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
        "/models": None,
    },
    "Search and collections": {
        "/collections/{name}/points": {
            "points": [{"id": id_, "text": text} for id_, text in enumerate(DOCUMENTS)],
            "create": True,
        },
        "/search": {"collection": COLLECTION, "query": QUERY, "limit": 3},
        "/collections": None,
        "/collections/{name}/points/{identity}": None,
        "/collections/{name}/points/delete": {"ids": ["old"]},
        "/collections/{name}/points/payload": {"ids": [0], "set": {"checked": True}},
        "/collections/{name}/export": None,
        "/collections/{name}/import": EXPORT,
    },
    "Qdrant": {
        "/qdrant/inference": {"inputs": [{"data": text} for text in TEXTS], "inference": "update"},
    },
    "Operations": {
        "/health": None,
        "/info": None,
        "/metrics": None,
        "/v1/models": None,
    },
}
TAGS = {path: tag for tag, examples in EXAMPLES.items() for path in examples}
# A key is sent if the server asks for one
SECURITY: Mapping[str, Any] = {"key": {"type": "http", "scheme": "bearer"}}


def document(app: Litestar) -> dict[str, Any]:
    """The document of an application's routes."""
    paths_and_routes = documented(app)
    kinds = [
        kind
        for _, route in paths_and_routes
        for kind in (*route.requests, *answers_of(route), route.wire.error)
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for path, route in paths_and_routes:
        operation = _operation(path, route, schema_of)
        name = TEI_RESPONSES.get(path)
        if name is not None:
            content = operation["responses"]["200"]["content"]["application/json"]
            components[name] = content["schema"]
            content["schema"] = {"$ref": REFERENCE + name}
        paths.setdefault(path, {})[route.methods[0].lower()] = operation
    _name_fields(components)
    _admit_nulls(components, [route for _, route in paths_and_routes])
    info = INFO
    tags = [tag for tag in EXAMPLES if any(path in paths for path in EXAMPLES[tag])]
    if all(route.is_tei for _, route in paths_and_routes):
        info = INFO | {"title": TEI_TITLE}
        tags = [TEI_TITLE]
        for operations in paths.values():
            for operation in operations.values():
                operation["tags"] = tags
    return {
        "openapi": "3.1.0",
        "info": info,
        "tags": [{"name": tag} for tag in tags],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SECURITY},
        "security": [{}, {"key": []}],
    }


def _admit_nulls(components: dict[str, Any], routes: Sequence[Route]) -> None:
    """On routes of other APIs than TEI a null is an absent field: add it to the fields that may be
    missing, in the structs that only these routes read."""
    read_by_tei = {kind for route in routes for kind in route.requests[: route.is_tei]}
    for route in routes:
        if not (route.is_peer or route.is_shared):
            continue
        for kind in route.requests:
            name = getattr(kind, "__name__", None)
            if name not in components or kind in read_by_tei:
                continue
            fields = components[name]["properties"]
            for field in fields.keys() - {*components[name].get("required", ())}:
                fields[field] = _nullable(fields[field])


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("anyOf", ())
    if schema.get("type") == "null" or {"type": "null"} in kinds:
        return schema
    # Keys of the field, not of its type
    own: dict[str, Any] = {key: schema[key] for key in ("description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in own}
    return {"anyOf": [inner, {"type": "null"}], **own}


def _operation(path: str, route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    requests = route.requests
    answers = answers_of(route)
    text = cleandoc(route.work.__doc__ or "")
    names = re.findall(r"{(\w+)}", path)
    answer: dict[str, Any] = {"description": text}
    is_deletion = "DELETE" in route.methods
    operation: dict[str, Any] = {
        "tags": [TAGS[path]],
        "operationId": re.sub(r"\W+", "_", path).strip("_") + "_delete" * is_deletion,
        "summary": text.partition(".")[0],
        "description": text,
        "parameters": [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": TEXT,
                "example": "imported" if path.endswith("/import") else COLLECTION,
            }
            for name in names
        ],
        "responses": {"200": answer},
    }
    if answers:
        answer["content"] = _json(_one_of(answers, schema_of))
    if route.gives != JSON:
        answer["content"] = {route.gives.decode(): {"schema": TEXT}}
    if requests or route.takes != JSON:
        schema = TEXT if not requests else _one_of(requests, schema_of)
        media = {"schema": schema, "example": EXAMPLES[TAGS[path]][path]}
        content = {route.takes.decode(): media}
        operation["requestBody"] = {"required": True, "content": content}
    if requests or route.source == "store":
        operation["responses"] |= _errors(route, schema_of)
    return operation


def documented(app: Litestar) -> list[tuple[str, Route]]:
    """(path, route) of the routes in the document, sorted by path."""
    return [
        (route.path_format, handler.opt[ROUTE])
        for route in sorted(app.routes, key=lambda route: route.path)
        for handler in getattr(route, "route_handlers", ())
        if ROUTE in handler.opt
        and handler.opt[ROUTE].in_schema
        and not route.path.startswith(BELOW)
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
            known_fields = {
                key: fields[field].pop(key)
                for key in ("description", "default")
                if key in fields[field]
            }
            components.setdefault(name, fields[field])
            fields[field] = {"$ref": REFERENCE + name, **known_fields}
    schema = {"$ref": f"{REFERENCE}InputType"}
    components["InputType"] = msgspec.json.schema(InputType)
    components["Input"] = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1}]}


def _errors(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    """Status -> the response's schema."""
    schema = schema_of[repr(route.wire.error)]
    # Voyage's client gets the same without `error` from the routes that it shares
    if route.wire.error is ClientsErrorResponse:
        schema = {"anyOf": [schema, schema_of[repr(VoyageErrorResponse)]]}
    content = _json(schema)
    # An error of a body may also be plain text
    of_bodies = content if route.wire.error.takes_body_errors else content | PLAIN_TEXT
    return NO_KEY | {
        status: {"description": meaning, "content": of_bodies if status in OF_BODIES else content}
        for status, meaning in ERRORS.items()
    }


def _one_of(kinds: Sequence[Any], schema_of: dict[str, Any]) -> Any:
    schemas = [schema_of[repr(kind)] for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
