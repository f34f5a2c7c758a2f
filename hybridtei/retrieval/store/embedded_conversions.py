"""Converts collections, points, queries and answers between the embedded engine's types and plain
lists and maps.

It runs in the engine's process, which never imports qdrant-client; schemas arrive as that client's
JSON. A field that the engine lacks raises ValueError. A sparse vector with unequal numbers of
indices and values makes the engine panic and destroys the collection, so this module counts them
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import qdrant_edge as edge

Plain = Mapping[str, Any]
# A server's default
HNSW_DEFAULTS = {
    "m": 16,
    "ef_construct": 100,
    "full_scan_threshold": 10_000,
    "max_indexing_threads": 0,
}
# By the fields of their members
ENUMERATIONS = {
    "distance": edge.Distance,
    "comparator": edge.MultiVectorComparator,
    "datatype": edge.VectorStorageDatatype,
    "memory": edge.Memory,
    "modifier": edge.Modifier,
    "type": edge.ScalarType,
    "compression": edge.CompressionRatio,
    "encoding": edge.BinaryQuantizationEncoding,
    "query_encoding": edge.BinaryQuantizationQueryEncoding,
    "bits": edge.TurboQuantBitSize,
}
# By the fields that hold them, or by the kind of quantisation
OBJECTS = {
    "multivector_config": edge.MultiVectorConfig,
    "hnsw_config": edge.HnswIndexConfig,
    "scalar": edge.ScalarQuantizationConfig,
    "product": edge.ProductQuantizationConfig,
    "binary": edge.BinaryQuantizationConfig,
    "turbo": edge.TurboQuantQuantizationConfig,
}


def config_of(schema: Plain) -> edge.EdgeConfig:
    """The engine's configuration of a collection. Ignores shards and replicas."""
    return edge.EdgeConfig(
        vectors={
            name: _made(edge.EdgeVectorParams, params) for name, params in schema["vectors"].items()
        },
        sparse_vectors={
            name: _made(edge.EdgeSparseVectorParams, _flat(params))
            for name, params in schema["sparse"].items()
        },
        on_disk_payload=schema.get("on_disk_payload"),
    )


def _flat(params: Plain) -> Plain:
    """A sparse vector's settings and its index's settings, in one object. The engine has no
    modifier `none`."""
    flat = {"modifier": params.get("modifier"), **(params.get("index") or {})}
    if flat["modifier"] == "none":
        del flat["modifier"]
    return flat


def _made(kind: Any, fields: Plain) -> Any:
    """Make the engine's `kind` from JSON's fields."""
    return kind(
        **{name: _field(name, value) for name, value in fields.items() if value is not None}
    )


def _field(name: str, value: Any) -> Any:
    if name in ENUMERATIONS:
        return _member(ENUMERATIONS[name], value)
    # It holds one kind's settings under the kind's name
    if name == "quantization_config":
        ((name, value),) = value.items()
    if name == "hnsw_config":
        value = {**HNSW_DEFAULTS, **value}
    return _made(OBJECTS[name], value) if name in OBJECTS else value


def _member(kind: Any, word: str) -> Any:
    """The member of an engine's enumeration by JSON's spelling: `max_sim` is `MaxSim`."""
    letters = word.replace("_", "").lower()
    for name in dir(kind):
        if name.replace("_", "").lower() == letters and not name.startswith("_"):
            return getattr(kind, name)
    raise ValueError(f"the embedded engine has no {kind.__name__} {word!r}")


def vector_of(vector: Any) -> Any:
    """A list unchanged, an array as numbers, a pair of `indices` and `values` as a sparse
    vector."""
    if isinstance(vector, Mapping):
        indices, values = vector["indices"], vector["values"]
        if len(indices) != len(values):
            raise ValueError(f"a sparse vector of {len(indices)} indices and {len(values)} values")
        if len(set(map(int, indices))) != len(indices):
            raise ValueError("a sparse vector with an index that is there twice")
        return edge.SparseVector(indices=_numbers(indices), values=_numbers(values))
    return _numbers(vector)


def _numbers(vector: Any) -> Any:
    """A memoryview of an array: the engine reads it three times as fast as the array, whose numbers
    become objects."""
    if not isinstance(vector, np.ndarray):
        return vector
    # An array from a frame may be misaligned, which memoryviews refuse
    aligned: Any = np.require(vector, requirements="A")
    if vector.ndim == 1:
        return memoryview(aligned)
    return [memoryview(row) for row in aligned]


def point_of(point: Sequence[Any]) -> edge.Point:
    """Make the engine's point from a record: [id, payload, vectors, score]."""
    identity, payload, vectors, _ = point
    return edge.Point(
        id=identity,
        vector={name: vector_of(vector) for name, vector in vectors.items()},
        payload=payload,
    )


def plain_id(identity: Any) -> int | str:
    """A UUID as text."""
    return str(identity) if isinstance(identity, UUID) else identity


def plain_point(point: Any) -> list[Any]:
    """A record: [id, payload, vectors], and the score if it was queried. Sparse vectors are
    `indices` and `values`."""
    vectors: dict[str, Any] = {}
    for name, vector in (point.vector or {}).items():
        vectors[name] = vector
        if isinstance(vector, edge.SparseVector):
            vectors[name] = {"indices": list(vector.indices), "values": list(vector.values)}
    record = [plain_id(point.id), point.payload or {}, vectors]
    if isinstance(point, edge.ScoredPoint):
        record.append(point.score)
    return record


def filter_of(plain: Plain | None) -> Any:
    """The engine's filter; None stays None."""
    if plain is None:
        return None
    min_should = plain.get("min_should")
    if min_should:
        conditions = _conditions(min_should["conditions"]) or []
        min_should = edge.MinShould(conditions, min_should["min_count"])
    return edge.Filter(
        must=_conditions(plain.get("must")),
        should=_conditions(plain.get("should")),
        must_not=_conditions(plain.get("must_not")),
        min_should=min_should,
    )


def _conditions(plain: Any) -> list[Any] | None:
    if plain is None:
        return None
    if isinstance(plain, Mapping):
        plain = [plain]
    return list(map(_condition_of, plain))


def _condition_of(plain: Plain) -> Any:
    """Convert one condition, or a filter inside a filter."""
    # A key is looked for first, since a field's condition may also have `is_empty`
    if "key" in plain:
        return edge.FieldCondition(
            **{
                name: _FIELDS[name](body) if name in _FIELDS else body
                for name, body in plain.items()
            }
        )
    for key, make in _CONDITIONS.items():
        if key in plain:
            return make(plain[key])
    return filter_of(plain)


_CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "is_empty": lambda body: edge.IsEmptyCondition(body["key"]),
    "is_null": lambda body: edge.IsNullCondition(body["key"]),
    "has_id": lambda body: edge.HasIdCondition(set(body)),
    "has_vector": edge.HasVectorCondition,
    "nested": lambda body: edge.NestedCondition(body["key"], filter_of(body["filter"])),
}


def _match(match: Plain) -> Any:
    ((key, value),) = match.items()
    # The engine reads Python's bool as the integer 1 or 0, numpy's bool correctly
    if isinstance(value, bool):
        value = np.bool_(value)
    return getattr(edge, f"Match{key.title().replace('_', '')}")(value)


def _range(bounds: Plain) -> Any:
    if any(isinstance(bound, str) for bound in bounds.values()):
        return edge.RangeDateTime(**bounds)
    return edge.RangeFloat(**bounds)


def _line(line: Plain) -> list[edge.GeoPoint]:
    return [edge.GeoPoint(**point) for point in line["points"]]


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "match": _match,
    "range": _range,
    "values_count": lambda count: edge.ValuesCount(**count),
    "geo_bounding_box": lambda box: edge.GeoBoundingBox(
        **{corner: edge.GeoPoint(**point) for corner, point in box.items()}
    ),
    "geo_radius": lambda circle: edge.GeoRadius(
        edge.GeoPoint(**circle["center"]), circle["radius"]
    ),
    "geo_polygon": lambda area: edge.GeoPolygon(
        _line(area["exterior"]), [_line(line) for line in area.get("interiors", ())]
    ),
}


def request_of(query: Plain) -> edge.QueryRequest:
    """Convert a whole query."""
    oversampling = query.get("oversampling")
    quantization = oversampling and edge.QuantizationSearchParams(
        ignore=False, rescore=True, oversampling=oversampling
    )
    return edge.QueryRequest(
        offset=0,
        limit=query["limit"],
        query=edge.Query.Nearest(vector_of(query["vector"]), query["using"]),
        prefetches=[],
        params=edge.SearchParams(exact=query.get("exact", False), quantization=quantization),
        filter=filter_of(query.get("filter")),
        with_payload=query.get("with_payload", False),
        with_vector=False,
    )


def payload_selector(selector: Any) -> Any:
    """True, False, a list of keys, or keys to exclude."""
    if isinstance(selector, Mapping):
        return edge.PayloadSelector.Exclude(list(selector["exclude"]))
    return selector


def index_of(kind: str) -> Any:
    """The engine's settings of a payload index."""
    if kind == "text":
        return edge.TextIndexParams(lowercase=True, phrase_matching=True)
    name = kind.rstrip("!").capitalize()
    if kind.endswith("!"):
        return getattr(edge, f"{name}IndexParams")(is_tenant=True)
    return getattr(edge.PayloadSchemaType, name)
