"""A Qdrant server or cluster, by gRPC where its address allows.

Every call has a time limit and raises an error that says what to do; while the server is unavailable the call is retried,
unless the store is not `patient`. Writes wait until they are applied: the server may refuse a write after it only acknowledged
it. qdrant-client turns each number of a vector into a Python object on the way to gRPC; here a vector's bytes are copied into
the message.
"""

from __future__ import annotations

import asyncio
import logging
import math
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from qdrant_client import AsyncQdrantClient, grpc, models
from qdrant_client.conversions.conversion import RestToGrpc

from hybridtei.config import StoreConfig
from hybridtei.errors import CollectionMismatch, HybridTeiError, StoreError
from hybridtei.store.base import CollectionSchema, PointId, Selector, selector
from hybridtei.store.collection import check_fits, check_names, create_arguments, query_arguments, schema_of
from hybridtei.store.failures import CLIENT_ERRORS, Availability, retry_unavailable, store_error
from hybridtei.store.packed import format_in, query_packed, uses_multivector
from hybridtei.store.points import as_lists, batches, check_points
from hybridtei.system.frames import nested

T = TypeVar("T")
REST_PORT, GRPC_PORT = 6333, 6334
JSON_BYTES_PER_NUMBER = 20
# By default a channel waits up to two minutes before it connects again.
CHANNEL = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2000,
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address: `port` for REST; `grpc_port` is None where only REST is used."""

    host: str
    port: int
    grpc_port: int | None
    tls: bool
    prefix: str = ""


def address_of(url: str) -> Address:
    """Read a server's address. Raises StoreError.

    `http(s)://host` with port 6333, 6334 or none: gRPC on 6334. Any other port, or a path: REST there, since proxies speak it.
    `grpc(s)://host:port`: gRPC there.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise StoreError(f"`qdrant_url` {url!r}: {error}") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise StoreError(f"`qdrant_url` {url!r}: should look like http://host:6334, https://host or grpc://host:port")
    if parts.username or parts.password or parts.query:
        raise StoreError("`qdrant_url` holds a user, password or query: give the key as `qdrant_api_key`")
    prefix, tls = parts.path.rstrip("/"), parts.scheme in ("https", "grpcs")
    if parts.scheme in ("grpc", "grpcs"):
        return Address(parts.hostname, REST_PORT, port or GRPC_PORT, tls)
    if port in (None, REST_PORT, GRPC_PORT) and not prefix:
        return Address(parts.hostname, REST_PORT, GRPC_PORT, tls)
    return Address(parts.hostname, port or REST_PORT, None, tls, prefix)


class ServerStore:
    """One client for a process, used from one event loop; it connects at the first call.

    `patient`: calls are retried for `qdrant_patience`; else they fail at once while the server is away.
    """

    kind = "server"

    def __init__(self, config: StoreConfig, *, patient: bool = True) -> None:
        assert config.qdrant_url is not None
        self._url = config.qdrant_url
        self._timeout_s, self._patience_s = config.qdrant_timeout, config.qdrant_patience
        address = address_of(config.qdrant_url)
        self._grpc = address.grpc_port is not None
        self._client = _client(address, config)
        self._schemas: dict[str, CollectionSchema] = {}
        self._availability = None if patient else Availability(lambda: self._once(lambda: self._client.collection_exists("-")))

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call()
        except CLIENT_ERRORS as error:
            raise store_error(error, self._url) from error

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        if self._availability is not None:
            return await self._availability.call(lambda: self._once(call))
        return await retry_unavailable(lambda: self._once(call), self._patience_s)

    async def collections(self) -> list[str]:
        response = await self._call(self._client.get_collections)
        return sorted(collection.name for collection in response.collections)

    async def describe(self, name: str) -> CollectionSchema | None:
        if not await self._call(lambda: self._client.collection_exists(name)):
            self._schemas.pop(name, None)
            return None
        schema = schema_of(await self._call(lambda: self._client.get_collection(name)))
        self._schemas[name] = schema
        return schema

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        tries = 0

        async def attempt() -> None:
            nonlocal tries
            tries += 1
            await self._client.create_collection(name, timeout=self._whole_timeout, **create_arguments(schema))

        try:
            await self._call(attempt)
        except HybridTeiError:
            # a try whose answer was lost may have created it
            if tries == 1 or not await self._exists(name, schema):
                raise
        self._schemas[name] = schema

    async def _exists(self, name: str, schema: CollectionSchema) -> bool:
        existing = await self.describe(name)
        if existing is None:
            return False
        try:
            check_fits(existing, schema, name)
        except CollectionMismatch:
            return False
        return True

    async def drop(self, name: str) -> None:
        self._schemas.pop(name, None)
        await self._call(lambda: self._client.delete_collection(name, timeout=self._whole_timeout))

    async def upsert(self, name: str, points: Sequence[models.PointStruct]) -> None:
        schema = self._schemas.get(name) or await self.describe(name)
        if schema is None:
            raise StoreError(f"Qdrant at {self._url}: there is no collection {name!r}")
        arrays = await asyncio.to_thread(check_points, points, schema)  # thousands of points would block the event loop
        for batch in batches(arrays, bytes_per_number=4 if self._grpc else JSON_BYTES_PER_NUMBER):
            try:
                await self._upsert_batch(name, batch)
            except StoreError:
                self._schemas.pop(name, None)  # another client may have dropped and created it anew
                raise

    async def _upsert_batch(self, name: str, batch: Sequence[models.PointStruct]) -> None:
        if self._grpc:
            message = await asyncio.to_thread(grpc_upsert, name, batch)

            async def attempt() -> bool:
                return is_applied(await self._client.grpc_points.Upsert(message, timeout=self._timeout_s))
        else:
            listed = await asyncio.to_thread(lambda: [as_lists(point) for point in batch])

            async def attempt() -> bool:
                result = await self._client.upsert(name, listed, wait=True)
                return result.status == models.UpdateStatus.COMPLETED

        async def applied() -> None:
            if not await attempt():
                raise TimeoutError  # acknowledged, and not applied in time

        await self._call(applied)

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
        if uses_multivector(request) and (packed := await format_in(self, name, self._schemas)) is not None:
            return await query_packed(self, name, request, packed)
        response = await self._call(lambda: self._client.query_points(name, **query_arguments(request)))
        return list(response.points)

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[models.Record]:
        payload, vectors = selector(with_payload), selector(with_vectors)
        return await self._call(lambda: self._client.retrieve(name, list(ids), with_payload=payload, with_vectors=vectors))

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: models.Filter | None = None,
        with_payload: bool = True,
        with_vectors: Selector = False,
    ) -> tuple[list[models.Record], PointId | None]:
        page: dict[str, Any] = {"limit": limit, "offset": offset, "scroll_filter": scroll_filter, "with_payload": with_payload}
        vectors = selector(with_vectors)
        answer: Any = await self._call(lambda: self._client.scroll(name, with_vectors=vectors, **page))
        records, following = answer
        return records, following

    async def count(self, name: str, count_filter: models.Filter | None = None) -> int:
        response = await self._call(lambda: self._client.count(name, count_filter=count_filter, exact=True))
        return response.count

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        selector = models.PointIdsList(points=list(ids))
        await self._call(lambda: self._client.delete(name, selector, wait=True))

    async def optimize(self, name: str) -> None:
        """Nothing: a server optimizes by itself."""

    async def close(self) -> None:
        await self._client.close()

    @property
    def _whole_timeout(self) -> int:
        return math.ceil(self._timeout_s)


def _client(address: Address, config: StoreConfig) -> AsyncQdrantClient:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            client = AsyncQdrantClient(
                host=address.host,
                port=address.port,
                grpc_port=address.grpc_port or GRPC_PORT,
                prefer_grpc=address.grpc_port is not None,
                https=address.tls,
                prefix=address.prefix or None,
                api_key=config.qdrant_api_key,
                timeout=math.ceil(config.qdrant_timeout),
                grpc_options=dict(CHANNEL),
                check_compatibility=False,
            )
        except ValueError as error:
            raise StoreError(f"`qdrant_url` {config.qdrant_url!r}: {error}") from error
    for warning in caught:
        logger.warning("Qdrant at %s: %s", config.qdrant_url, warning.message)
    return client


def grpc_upsert(collection: str, points: Sequence[models.PointStruct]) -> grpc.UpsertPoints:
    """The request that upserts checked points, with `wait` set."""
    return grpc.UpsertPoints(collection_name=collection, wait=True, points=[grpc_point(point) for point in points])


def is_applied(answer: grpc.PointsOperationResponse) -> bool:
    """Whether the server has applied an upsert, rather than only acknowledged it."""
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
    return nested(1, body)  # `data` of DenseVector, `values` of SparseVector
