"""The OpenAPI document, from the wire structs and the table of `operations`."""

from __future__ import annotations

from typing import Any

import msgspec

from hybridtei import __version__
from hybridtei.server.operations import OPERATIONS, Operation

ERRORS = {"400": "Empty input", "422": "Invalid input", "424": "Wrong kind of model, or a failed pass", "429": "Overloaded"}


def document() -> dict[str, Any]:
    """The document as a plain dictionary."""
    named = [kind for operation in OPERATIONS for kind in (operation.takes, operation.gives, operation.error) if kind]
    types = [kind for one in named for kind in (one if isinstance(one, tuple) else (one,))]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = {_key(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
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


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": operation.summary}}
    if operation.gives is not None:
        answers["200"]["content"] = _json(_schema(operation.gives, schema_of))
    described: dict[str, Any] = {"tags": ["Text Embeddings Inference"], "summary": operation.summary, "responses": answers}
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": _json(_schema(operation.takes, schema_of))}
        for status, meaning in ERRORS.items():
            answers[status] = {"description": meaning, "content": _json(_schema(operation.error, schema_of))}
    return described


def _schema(kind: Any, schema_of: dict[str, Any]) -> Any:
    return {"oneOf": [schema_of[_key(one)] for one in kind]} if isinstance(kind, tuple) else schema_of[_key(kind)]


def _key(kind: Any) -> str:
    return repr(kind)


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
