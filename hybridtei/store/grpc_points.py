"""Points as Qdrant's gRPC messages, with vectors written as the bytes they are.

The surprise: protobuf's packed floats are little-endian float32 one after the other, so a numpy array is already the wire
format; handing it over number by number takes five to eight times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import RestToGrpc

PACKED_FIRST_FIELD = b"\x0a"  # field 1, length-delimited: `data` of DenseVector, `values` of SparseVector


def grpc_upsert(collection: str, points: Sequence[models.PointStruct]) -> grpc.UpsertPoints:
    """The request that stores checked points and is answered when they are applied."""
    return grpc.UpsertPoints(collection_name=collection, wait=True, points=[grpc_point(point) for point in points])


def is_applied(answer: grpc.PointsOperationResponse) -> bool:
    """Not merely taken."""
    return bool(answer.result.status == grpc.UpdateStatus.Completed)


def grpc_point(point: models.PointStruct) -> grpc.PointStruct:
    """The message of a checked point, whose vectors are arrays."""
    assert isinstance(point.vector, Mapping)
    vectors = {name: _vector(vector) for name, vector in point.vector.items()}
    return grpc.PointStruct(
        id=RestToGrpc.convert_extended_point_id(point.id),
        vectors=grpc.Vectors(vectors=grpc.NamedVectors(vectors=vectors)),
        payload=RestToGrpc.convert_payload(point.payload or {}),
    )


def _vector(vector: Any) -> grpc.Vector:
    if isinstance(vector, models.SparseVector):
        sparse = grpc.SparseVector.FromString(_packed(np.asarray(vector.values)))
        sparse.indices.extend(np.asarray(vector.indices).tolist())
        return grpc.Vector(sparse=sparse)
    if vector.ndim == 1:
        return grpc.Vector(dense=grpc.DenseVector.FromString(_packed(vector)))
    rows = [grpc.DenseVector.FromString(_packed(row)) for row in vector]
    return grpc.Vector(multi_dense=grpc.MultiDenseVector(vectors=rows))


def _packed(array: NDArray[Any]) -> bytes:
    body = np.ascontiguousarray(array, dtype="<f4").tobytes()
    return PACKED_FIRST_FIELD + _varint(len(body)) + body


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
