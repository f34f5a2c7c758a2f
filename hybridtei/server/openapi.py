"""The OpenAPI document, from the wire structs and one table. Handlers read bodies themselves, so nothing else knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from hybridtei import __version__
from hybridtei.server.wire import hybrid, openai, tei

Vector = list[float]


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: what it takes and gives."""

    method: str
    path: str
    summary: str
    takes: Any = None
    gives: Any = None
    error: Any = tei.ErrorResponse


OPERATIONS = (
    Operation("get", "/health", "Health check"),
    Operation("get", "/info", "The model and the limits", gives=dict[str, Any]),
    Operation("get", "/metrics", "Prometheus metrics"),
    Operation("post", "/embed", "Dense vectors", tei.EmbedRequest, list[Vector]),
    Operation("post", "/embed_all", "A raw vector for each token", tei.EmbedAllRequest, list[list[Vector]]),
    Operation("post", "/embed_sparse", "Sparse vectors", tei.EmbedSparseRequest, list[list[tei.SparseValue]]),
    Operation("post", "/embed_multivector", "A unit vector for each token", hybrid.EmbedMultivectorRequest, list[list[Vector]]),
    Operation(
        "post", "/embed_hybrid", "Several outputs of one forward pass", hybrid.EmbedHybridRequest, list[hybrid.HybridEmbedding]
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "OpenAI embeddings",
        openai.OpenAICompatRequest,
        openai.OpenAICompatResponse,
        openai.OpenAICompatErrorResponse,
    ),
    Operation("post", "/similarity", "Cosine of one sentence to many", tei.SimilarityRequest, Vector),
    Operation("post", "/tokenize", "Tokens with their places", tei.TokenizeRequest, list[list[tei.SimpleToken]]),
    Operation("post", "/decode", "Ids back to text", tei.DecodeRequest, list[str]),
)
ERRORS = {"400": "Empty input", "422": "Invalid input", "424": "Wrong kind of model, or a failed pass", "429": "Overloaded"}


def document() -> dict[str, Any]:
    """The document as a plain dictionary."""
    types = [kind for operation in OPERATIONS for kind in (operation.takes, operation.gives, operation.error) if kind]
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
        answers["200"]["content"] = _json(schema_of[_key(operation.gives)])
    described: dict[str, Any] = {"tags": ["Text Embeddings Inference"], "summary": operation.summary, "responses": answers}
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": _json(schema_of[_key(operation.takes)])}
        for status, meaning in ERRORS.items():
            answers[status] = {"description": meaning, "content": _json(schema_of[_key(operation.error)])}
    return described


def _key(kind: Any) -> str:
    return repr(kind)


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
