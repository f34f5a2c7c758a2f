"""The messages and services of `tei.proto`, from `tei.binpb`: protoc's FileDescriptorSet of that
file.

    python -m grpc_tools.protoc -I hybridtei/server/grpc
    --descriptor_set_out=hybridtei/server/grpc/tei.binpb tei.proto

There is no generated code, since it needs one particular release of protobuf's runtime. The
descriptor pool is our own, so a client's generated `tei.v1` can live in the same process.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from hybridtei.outputs import Floats
from hybridtei.system.frames import nested

PACKAGE, FILE = "tei.v1", "tei.proto"
POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("tei.binpb").read_bytes()
).file:
    POOL.AddSerializedFile(_file.SerializeToString())


def message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def services() -> Iterator[Any]:
    """The descriptors of all services, in the order of the file."""
    return iter(POOL.FindFileByName(FILE).services_by_name.values())


EncodeResponse, DecodeResponse, EmbedSparseResponse = map(
    message, ("EncodeResponse", "DecodeResponse", "EmbedSparseResponse")
)
PredictResponse, RerankResponse = message("PredictResponse"), message("RerankResponse")
InfoResponse, Metadata = message("InfoResponse"), message("Metadata")
# TRUNCATION_DIRECTION_LEFT
LEFT = 1


def floats(field: int, row: Floats) -> bytes:
    """Encode float32[d] as `repeated float`, packed."""
    return nested(field, row.astype("<f4", copy=False).tobytes())


def float_rows(field: int, inner: int, rows: Floats) -> bytes:
    """Encode float32[t, d] as a repeated message with one field: `repeated float`."""
    count, width = rows.shape
    # Rows have equal lengths, so the tags and lengths in front of their numbers are equal too
    zero_row = nested(field, floats(inner, np.zeros(width, dtype=np.float32)))
    prefix = np.frombuffer(zero_row, dtype=np.uint8)[: len(zero_row) - 4 * width]
    encoded = np.empty((count, len(prefix) + 4 * width), dtype=np.uint8)
    encoded[:, : len(prefix)] = prefix
    encoded[:, len(prefix) :] = np.ascontiguousarray(rows, dtype="<f4").view(np.uint8)
    return encoded.tobytes()
