"""Collections, points and answers in the words of the embedded engine, from and to plain lists and maps.

Runs in the owner process, which never loads qdrant-client: schemas arrive as that client writes them in JSON. What the engine
lacks is refused with a ValueError. It panics, and a collection is lost, on a sparse vector whose indices and
values differ in number, so none is built here without counting them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import qdrant_edge as edge

Plain = Mapping[str, Any]


def member(kind: Any, word: str) -> Any:
    """The member of an engine's enumeration that JSON spells so: `max_sim` is `MaxSim`."""
    wanted = word.replace("_", "").lower()
    for name in dir(kind):
        if name.replace("_", "").lower() == wanted and not name.startswith("_"):
            return getattr(kind, name)
    raise ValueError(f"the embedded engine has no {kind.__name__} {word!r}")


def optional(kind: Any, word: str | None) -> Any:
    """As `member`; None stays None."""
    return None if word is None else member(kind, word)


def config_of(schema: Plain) -> edge.EdgeConfig:
    """Of a collection's layout. Shards and replicas mean nothing here."""
    return edge.EdgeConfig(
        vectors={name: _vector_params(params) for name, params in schema["vectors"].items()},
        sparse_vectors={name: _sparse_params(params) for name, params in schema["sparse"].items()},
        on_disk_payload=schema.get("on_disk_payload"),
    )


def _vector_params(params: Plain) -> edge.EdgeVectorParams:
    multivector, graph = params.get("multivector_config"), params.get("hnsw_config")
    return edge.EdgeVectorParams(
        size=params["size"],
        distance=member(edge.Distance, params["distance"]),
        on_disk=params.get("on_disk"),
        multivector_config=multivector
        and edge.MultiVectorConfig(comparator=member(edge.MultiVectorComparator, multivector["comparator"])),
        datatype=optional(edge.VectorStorageDatatype, params.get("datatype")),
        quantization_config=_quantization(params.get("quantization_config")),
        hnsw_config=graph and _graph(graph),
        memory=optional(edge.Memory, params.get("memory")),
    )


def _graph(graph: Plain) -> edge.HnswIndexConfig:
    """The engine wants all; these are the server's defaults."""
    return edge.HnswIndexConfig(
        m=_or(graph.get("m"), 16),
        ef_construct=_or(graph.get("ef_construct"), 100),
        full_scan_threshold=_or(graph.get("full_scan_threshold"), 10_000),
        max_indexing_threads=_or(graph.get("max_indexing_threads"), 0),
        on_disk=graph.get("on_disk"),
        payload_m=graph.get("payload_m"),
        inline_storage=graph.get("inline_storage"),
        memory=optional(edge.Memory, graph.get("memory")),
    )


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _sparse_params(params: Plain) -> edge.EdgeSparseVectorParams:
    index, modifier = params.get("index") or {}, params.get("modifier")
    return edge.EdgeSparseVectorParams(
        full_scan_threshold=index.get("full_scan_threshold"),
        on_disk=index.get("on_disk"),
        modifier=None if modifier in (None, "none") else member(edge.Modifier, modifier),
        datatype=optional(edge.VectorStorageDatatype, index.get("datatype")),
        memory=optional(edge.Memory, index.get("memory")),
    )


def _quantization(config: Plain | None) -> Any:
    if not config:
        return None
    ((kind, params),) = config.items()
    kept = {"always_ram": params.get("always_ram"), "memory": optional(edge.Memory, params.get("memory"))}
    if kind == "scalar":
        return edge.ScalarQuantizationConfig(
            type=member(edge.ScalarType, params["type"]), quantile=params.get("quantile"), **kept
        )
    if kind == "product":
        return edge.ProductQuantizationConfig(compression=member(edge.CompressionRatio, params["compression"]), **kept)
    if kind == "binary":
        return edge.BinaryQuantizationConfig(
            encoding=optional(edge.BinaryQuantizationEncoding, params.get("encoding")),
            query_encoding=optional(edge.BinaryQuantizationQueryEncoding, params.get("query_encoding")),
            **kept,
        )
    if kind in ("turbo", "turbo_quant"):
        return edge.TurboQuantQuantizationConfig(bits=optional(edge.TurboQuantBitSize, params.get("bits")), **kept)
    raise ValueError(f"the embedded engine has no {kind!r} quantisation")


def vector_of(vector: Any) -> Any:
    """A list as it is, an array as its numbers; a pair of `indices` and `values` as a sparse vector."""
    if isinstance(vector, Mapping):
        indices, values = vector["indices"], vector["values"]
        if len(indices) != len(values):
            raise ValueError(f"a sparse vector of {len(indices)} indices and {len(values)} values")
        if len(set(map(int, indices))) != len(indices):
            raise ValueError("a sparse vector with an index that is there twice")
        return edge.SparseVector(indices=_numbers(indices), values=_numbers(values))
    return _numbers(vector)


def _numbers(vector: Any) -> Any:
    """The engine reads a view in a third of the time that it takes for an array, of which each number is an object first."""
    if not isinstance(vector, np.ndarray):
        return vector
    aligned: Any = np.require(vector, requirements="A")  # out of a frame it may lie at any byte, and views refuse that
    return memoryview(aligned) if vector.ndim == 1 else [memoryview(row) for row in aligned]


def point_of(point: Sequence[Any]) -> edge.Point:
    """Of [id, vectors, payload]."""
    identity, vectors, payload = point
    return edge.Point(id=identity, vector={name: vector_of(vector) for name, vector in vectors.items()}, payload=payload)


def plain_id(identity: Any) -> int | str:
    """A UUID as text."""
    return str(identity) if isinstance(identity, UUID) else identity


def plain_vectors(vectors: Any) -> Any:
    """By name; sparse ones as `indices` and `values`."""
    if vectors is None:
        return None
    return {name: _plain_vector(vector) for name, vector in vectors.items()}


def _plain_vector(vector: Any) -> Any:
    if isinstance(vector, edge.SparseVector):
        return {"indices": list(vector.indices), "values": list(vector.values)}
    return vector


def plain_point(found: Any) -> list[Any]:
    """[id, payload, vectors] of what a retrieval or scroll found."""
    return [plain_id(found.id), found.payload, plain_vectors(found.vector)]


def plain_scored(found: Any) -> list[Any]:
    """[id, payload, vectors, version, score] of what a query found."""
    return [*plain_point(found), found.version, found.score]
