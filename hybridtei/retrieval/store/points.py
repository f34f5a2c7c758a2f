"""Makes points from encoder outputs, and checks the rules of a point before a store is called.

Stores check different rules: a server accepts NaN by gRPC, the embedded engine stores duplicate
indices and loses a collection to a sparse vector of unequal lengths, and only a server refuses a
multi-vector of a million floats. So this module checks all rules. Points have numpy arrays, since
making Python floats of a multi-vector costs more than storing it. Stores also accept lists and
qdrant-client's points.
"""

from __future__ import annotations

import asyncio
import base64
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Ragged
from hybridtei.errors import InvalidPoint, StoreError
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.store.base import (
    MULTIVECTOR,
    SPARSE,
    CollectionSchema,
    PointId,
    Store,
    Stored,
    VectorParams,
    check_ids,
)
from hybridtei.retrieval.store.plan import (
    PACKED,
    PackedFormat,
    document_rows,
    fit_to_schema,
    packed_format,
    packed_text,
)

MAX_ID = 2**64 - 1
MAX_INDEX = 2**32 - 1
# A server refuses this many; embedded stores accept them, but the data may move to a server
MAX_MULTIVECTOR_FLOATS = 1_048_576
# The server's JSON parser stops at 128
MAX_PAYLOAD_DEPTH = 100
MAX_BATCH_BYTES = 8_000_000
MAX_BATCH_POINTS = 256
# Bytes of a point's id and framing
POINT_OVERHEAD = 64
_NAMESPACE = uuid.UUID("6f1d2c64-0a55-5d0e-9a4e-3c1f5b7e2d90")
_INTEGERS = (-(2**63), 2**63 - 1)


def point_id(source: str, chunk: int) -> str:
    """The id of a chunk: a UUID from source and chunk, so that a second upsert replaces the
    first."""
    return str(uuid.uuid5(_NAMESPACE, f"{source}#{chunk}"))


def uuid_of(text: str) -> str | None:
    """A UUID in its usual form, or None."""
    with suppress(ValueError):
        return str(uuid.UUID(text))
    return None


def to_points(
    embeddings: Embeddings,
    ids: Sequence[PointId],
    payloads: Sequence[Mapping[str, Any]] | None = None,
    schema: CollectionSchema | None = None,
) -> list[Stored]:
    """Make one point a row, with a named vector for each column that is not None. Empty sparse
    vectors are left out.

    Vectors are arrays: float32[d], float32[t, d'], and uint32 indices with float32 values.
    Multi-vectors of other numbers go into the payload; InvalidPoint is raised if their key is
    taken. `schema`: cut, merge and quantise vectors as this collection keeps them. Raises
    ValueError if counts differ.
    """
    check_ids(ids)
    if schema is not None:
        embeddings = fit_to_schema(embeddings, schema)
        if embeddings.multivector is not None:
            rows = document_rows(embeddings.multivector, schema)
            embeddings = replace(embeddings, multivector=rows)
    if payloads is None:
        payloads = [{}] * len(ids)
    multivector = embeddings.multivector
    if multivector is not None and multivector.values.dtype != np.float32:
        for payload in payloads:
            check_key_is_free(payload)
        payloads = [
            {**payload, PACKED: packed_text(row)}
            for payload, row in zip(payloads, multivector, strict=True)
        ]
        # No vector of the point, since its payload has it
        embeddings = Embeddings(dense=embeddings.dense, sparse=embeddings.sparse)
    if not len(embeddings) == len(ids) == len(payloads):
        raise ValueError(
            f"{len(embeddings)} embeddings, {len(ids)} ids and {len(payloads)} payloads: should be "
            "as many of each"
        )
    points = [
        Stored(identity, dict(payload), embeddings.row(row))
        for row, (identity, payload) in enumerate(zip(ids, payloads, strict=True))
    ]
    for point in points:
        if sparse := point.vector.get(SPARSE):
            sparse["indices"] = sparse["indices"].astype(np.uint32)
            if not len(sparse["indices"]):
                del point.vector[SPARSE]
    return points


def check_key_is_free(payload: Mapping[str, Any]) -> None:
    """Raises InvalidPoint if a payload already has the key of the packed multi-vector."""
    if PACKED in payload:
        raise InvalidPoint(
            f"`payload.{PACKED}` is where the collection keeps multi-vectors: rename this key"
        )


async def checked_batches(
    store: Store,
    name: str,
    points: Sequence[Stored],
    schema: CollectionSchema | None,
    *,
    bytes_per_number: int = 4,
) -> list[list[Stored]]:
    """Check points in a thread, since thousands would block the event loop, and split them into
    batches."""
    schema = schema or await store.describe(name)
    if schema is None:
        raise StoreError(f"{store.place}: there is no collection {name!r}")
    checked = await asyncio.to_thread(check_points, points, schema)
    return list(batches(checked, bytes_per_number=bytes_per_number))


def check_points(points: Sequence[Stored], schema: CollectionSchema) -> list[Stored]:
    """Check points. Return them with arrays as vectors and canonical ids, without empty sparse
    vectors.

    Raises InvalidPoint, naming the first bad point, its field and the limit.
    """
    return [_checked(point, schema) for point in points]


def _checked(point: Stored, schema: CollectionSchema) -> Stored:
    identity = _identity(point.id)
    where = f"point {identity}"
    if not isinstance(point.vector, Mapping):
        raise InvalidPoint(
            f"{where}: `vector` should map names ({_names(schema)}) to vectors, not be one "
            f"{type(point.vector).__name__}"
        )
    if point.payload is not None and not isinstance(point.payload, Mapping):
        kind = type(point.payload).__name__
        raise InvalidPoint(f"{where}: `payload` is {kind}, should be an object")
    packed, payload = packed_format(schema), dict(point.payload or {})
    vectors: dict[str, Any] = {}
    for name, vector in point.vector.items():
        if name in schema.sparse:
            sparse = _sparse(vector, f"{where}, vector `{name}`")
            if len(sparse["indices"]):
                vectors[name] = sparse
        elif name in schema.vectors:
            vectors[name] = _dense(vector, schema.vectors[name], f"{where}, vector `{name}`")
        elif name == MULTIVECTOR and packed is not None:
            params = VectorParams(
                size=packed.width,
                distance="Cosine",
                multivector_config={},
            )
            rows = _dense(vector, params, f"{where}, vector `{name}`")
            check_key_is_free(payload)
            payload[PACKED] = packed_text(document_rows(Ragged.from_rows([rows]), schema).values)
        else:
            raise InvalidPoint(
                f"{where}: the collection has no vector `{name}`; it has {_names(schema)}"
            )
    if packed is not None and PACKED in payload:
        _check_packed(payload[PACKED], packed, f"{where}: `payload.{PACKED}`")
    return Stored(identity, _plain(payload, f"{where}: `payload", 0), vectors)


def _names(schema: CollectionSchema) -> str:
    return ", ".join(f"`{name}`" for name in (*schema.vectors, *schema.sparse)) or "none"


def _identity(value: Any) -> PointId:
    check_ids([value])
    if isinstance(value, int):
        if not 0 <= value <= MAX_ID:
            raise InvalidPoint(f"point {value}: `id` should be between 0 and {MAX_ID}")
        return value
    try:
        return str(uuid.UUID(str(value)))
    except ValueError as error:
        message = (
            f"point {value!r}: `id` is neither an integer nor a UUID; `point_id` makes one of any "
            "text"
        )
        raise InvalidPoint(message) from error


def _dense(vector: Any, params: VectorParams, where: str) -> NDArray[np.float32]:
    dimensions = 1 if params.multivector_config is None else 2
    array = _floats(vector, where)
    if array.ndim != dimensions:
        kind = "a list of numbers" if dimensions == 1 else "a list of vectors, with one at least"
        raise InvalidPoint(f"{where}: should be {kind}, has shape {list(array.shape)}")
    if array.shape[-1] != params.size:
        raise InvalidPoint(
            f"{where}: has {array.shape[-1]} dimensions, the collection {params.size}"
        )
    if dimensions == 2 and not len(array):
        raise InvalidPoint(f"{where}: is empty, a multi-vector needs one row at least")
    if dimensions == 2 and array.size >= MAX_MULTIVECTOR_FLOATS:
        max_rows = (MAX_MULTIVECTOR_FLOATS - 1) // params.size
        raise InvalidPoint(
            f"{where}: {len(array)} rows of {params.size} are {array.size} floats, allowed are "
            f"{max_rows} rows (fewer than {MAX_MULTIVECTOR_FLOATS} floats): cut the text into "
            "shorter chunks"
        )
    return array


def _check_packed(text: Any, packed: PackedFormat, where: str) -> None:
    """Check the bound of `_dense` before decoding."""
    if not isinstance(text, str):
        raise InvalidPoint(
            f"{where} is {type(text).__name__}, should be a multi-vector's bytes in base64: rename "
            "other values"
        )
    count = len(text) * 3 // 4 // packed.row_bytes
    if count * packed.width >= MAX_MULTIVECTOR_FLOATS:
        max_rows = (MAX_MULTIVECTOR_FLOATS - 1) // packed.width
        raise InvalidPoint(
            f"{where}: {count} rows of {packed.width} numbers, allowed are {max_rows} rows"
        )
    try:
        size = len(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise InvalidPoint(
            f"{where} should be a multi-vector's bytes in base64, rename other values: {error}"
        ) from error
    if size % packed.row_bytes:
        raise InvalidPoint(f"{where} has {size} bytes, should be rows of {packed.row_bytes}")


def _floats(values: Any, where: str) -> NDArray[np.float32]:
    """The values as finite float32. A float64 outside float32's range counts as infinite."""
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidPoint(
            f"{where}: should hold numbers, in rows of one width: {error}"
        ) from error
    finite = np.isfinite(array)
    if not finite.all():
        indices = np.argwhere(~np.atleast_1d(finite))[0].tolist()
        place = indices if len(indices) > 1 else indices[0]
        raise InvalidPoint(f"{where}: number {place} is not finite in float32")
    return array


def _sparse(vector: Any, where: str) -> dict[str, NDArray[Any]]:
    # A sparse vector of qdrant-client
    if hasattr(vector, "indices"):
        vector = {"indices": vector.indices, "values": vector.values}
    if not isinstance(vector, Mapping):
        raise InvalidPoint(
            f"{where}: should be a sparse vector of `indices` and `values`, not "
            f"{type(vector).__name__}"
        )
    values = _floats(vector.get("values", ()), f"{where}, `values`")
    indices = np.asarray(vector.get("indices", ()))
    if values.ndim != 1 or indices.ndim != 1 or len(indices) != len(values):
        raise InvalidPoint(
            f"{where}: {indices.size} indices and {values.size} values: should be as many, in one "
            "row each"
        )
    if len(indices) and (
        indices.dtype.kind not in "iu" or int(indices.min()) < 0 or int(indices.max()) > MAX_INDEX
    ):
        raise InvalidPoint(f"{where}: `indices` should be integers between 0 and {MAX_INDEX}")
    unique, counts = np.unique(indices, return_counts=True)
    if len(unique) != len(indices):
        raise InvalidPoint(
            f"{where}: index {unique[counts > 1][0]} is there {counts.max()} times, should be once"
        )
    return {"indices": indices.astype(np.uint32), "values": values}


def _plain(value: Any, path: str, depth: int) -> Any:
    """The value in JSON's types. Raises InvalidPoint if JSON or Qdrant's integers cannot represent
    it; messages close `path`'s quotation."""
    if depth > MAX_PAYLOAD_DEPTH:
        raise InvalidPoint(f"{path[:200]}…` is nested deeper than {MAX_PAYLOAD_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidPoint(f"{path}` has the key {key!r}, keys are strings")
        return {
            _text(key, path): _plain(item, f"{path}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, int):
        if not _INTEGERS[0] <= value <= _INTEGERS[1]:
            raise InvalidPoint(
                f"{path}` is {value}, integers go from {_INTEGERS[0]} to {_INTEGERS[1]}"
            )
        return int(value)
    if not isinstance(value, float):
        raise InvalidPoint(
            f"{path}` is {type(value).__module__}.{type(value).__name__}, should be what JSON has"
        )
    if not math.isfinite(value):
        raise InvalidPoint(f"{path}` is {value}, which JSON has no word for")
    return float(value)


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPoint(
            f"{path}`: {error.reason} at character {error.start}: not valid Unicode"
        ) from error
    return str(text)


def size_of(point: Stored, *, bytes_per_number: int = 4) -> int:
    """The approximate bytes of a point in a request: 4 a number by gRPC, about 20 as JSON."""
    numbers = sum(
        2 * len(vector["values"]) if isinstance(vector, Mapping) else int(np.size(vector))
        for vector in point.vector.values()
    )
    return POINT_OVERHEAD + bytes_per_number * numbers + len(msgspec.json.encode(point.payload))


def batches(
    points: Sequence[Stored],
    max_bytes: int = MAX_BATCH_BYTES,
    max_points: int = MAX_BATCH_POINTS,
    *,
    bytes_per_number: int = 4,
) -> Iterator[list[Stored]]:
    """Split points, in order, into batches of at most `max_bytes` and `max_points`. A larger point
    is alone in its batch."""
    batch: list[Stored] = []
    total = 0
    for point in points:
        size = size_of(point, bytes_per_number=bytes_per_number)
        if batch and (total + size > max_bytes or len(batch) == max_points):
            yield batch
            batch, total = [], 0
        batch.append(point)
        total += size
    if batch:
        yield batch
