"""The OpenAPI document, from the wire structs and the table of `operations`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hybridtei import __version__
from hybridtei.server.api import openai, tei
from hybridtei.server.api import qdrant_inference as inference
from hybridtei.server.openapi_bounds import INPUT_TYPE, narrow
from hybridtei.server.operations import ANSWERS, FIELDS, OPERATIONS, Operation

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
PARTS = re.compile(r"\{(\w+)\}")  # of a path, that are for the client to choose


def _of(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields]}


TEXT, CODE = {"type": "string"}, {"type": "integer"}
KIND = {"const": "NotFound"}  # not one of TEI's kinds of errors
NOT_FOUND = {
    tei.ErrorResponse: _of(error=TEXT, error_type=KIND),
    inference.InferenceError: _of(error=TEXT),
    openai.OpenAICompatErrorResponse: _of(message=TEXT, code=CODE, type=KIND),
    openai.ListedErrorResponse: _of(message=TEXT, code=CODE, type=KIND, detail={"type": "array"}),
}
REFERENCE = "#/components/schemas/"


def document(*, only_tei: bool = False) -> dict[str, Any]:
    """The document as a plain dictionary: of all routes, or of those that TEI has. TEI's schemas go by TEI's names."""
    operations = [operation for operation in OPERATIONS if operation.is_tei or not only_tei]
    named = [kind for operation in operations for kind in (operation.takes, operation.gives, operation.error) if kind]
    types = [kind for one in named for kind in (one if isinstance(one, tuple) else (one,))]
    schemas, components = msgspec.json.schema_components(types, ref_template=f"{REFERENCE}{{name}}")
    schema_of = {_key(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of, components)
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


def _operation(operation: Operation, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": operation.summary}}
    if operation.gives is not None:
        schema = _schema(operation.gives, schema_of)
        name = ANSWERS.get(operation.path)
        if name is not None:
            components[name], schema = schema, {"$ref": REFERENCE + name}
        answers["200"]["content"] = _json(schema)
    described: dict[str, Any] = {"tags": ["Text Embeddings Inference"], "summary": operation.summary, "responses": answers}
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": _json(_schema(operation.takes, schema_of))}
        for status, meaning in ERRORS.items():
            schema = NOT_FOUND[operation.error] if status == "404" else _schema(operation.error, schema_of)
            answers[status] = {"description": meaning, "content": _json(schema)}
        answers["401"] = {"description": NO_KEY}
        refused = PLAIN_TEXT if operation.is_refused_in_text else _json(_schema(operation.error, schema_of))
        for status, meaning in BODY_ERRORS.items():
            known = answers.setdefault(status, {"description": meaning, "content": {}})
            known["content"] = {**known["content"], **refused}
    if names := PARTS.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _schema(kind: Any, schema_of: dict[str, Any]) -> Any:
    return {"oneOf": [schema_of[_key(one)] for one in kind]} if isinstance(kind, tuple) else schema_of[_key(kind)]


def _key(kind: Any) -> str:
    return repr(kind)


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
