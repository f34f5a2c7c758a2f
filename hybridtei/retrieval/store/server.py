"""A Qdrant server or cluster, by gRPC if its address allows.

Every call has a time limit and raises an error that names the remedy. While the server is
unavailable, a `patient` store retries the call. Writes wait until they are applied, since a server
may refuse a write after acknowledging it. qdrant-client converts each number of a vector to a
Python object for gRPC; this module copies a vector's bytes into the message.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from qdrant_client import AsyncQdrantClient, grpc, models
from qdrant_client.conversions.conversion import RestToGrpc

from hybridtei.config import StoreConfig
from hybridtei.errors import HybridTeiError, StoreError, StoreUnavailable
from hybridtei.retrieval.store.base import (
    CollectionSchema,
    PointId,
    Selector,
    SparseVectorParams,
    Store,
    Stored,
    VectorParams,
    check_ids,
)
from hybridtei.retrieval.store.collection import check_fits, check_names
from hybridtei.retrieval.store.nodes import (
    CLIENT_ERRORS,
    Attempt,
    Nodes,
    address_of,
    client_of,
    store_error,
    urls_of,
)
from hybridtei.retrieval.store.points import checked_batches
from hybridtei.retrieval.store.query import Filter, Query
from hybridtei.system.frames import nested
from hybridtei.system.retries import retry_unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
JSON_BYTES_PER_NUMBER = 20
# Settings of a collection
PASSED_ON = ("shard_number", "replication_factor", "on_disk_payload")
# With this index `match: text` finds words, as in the embedded engine; without it, parts of words.
OF_WORDS = models.TextIndexParams(
    type=models.TextIndexType.TEXT,
    tokenizer=models.TokenizerType.WORD,
    lowercase=True,
    phrase_matching=True,
    on_disk=True,
)
# Keys of payloads in filters. Qdrant's strict mode refuses a filter on another key.
INDEXES = {
    "text": "text",
    "title": "text",
    "source": "keyword",
    "document_id": "keyword",
    "chunk": "integer",
}
TENANTS: Mapping[str, Any] = {
    "keyword!": models.KeywordIndexParams,
    "uuid!": models.UuidIndexParams,
}
# Another port, which a firewall may block
PEERS_S = 5.0
# The time of a call after which its node is checked, and the check's own bound. So a store that is
# not patient fails within two seconds, or within one if there is another node.
CHECKS_S, CHECKS_OF_A_CLUSTER_S = (1.0, 0.8), (0.5, 0.4)


class ServerStore(Store):
    """A process's clients of all nodes, for one event loop. It connects at the first call.

    `patient`: retry calls for `qdrant_patience`; otherwise they fail at once while the server is
    away.
    """

    kind = "server"

    def __init__(self, config: StoreConfig, *, patient: bool = True) -> None:
        assert config.qdrant_url is not None
        self._url, self.place = config.qdrant_url, f"Qdrant at {config.qdrant_url}"
        self._timeout_s, self._patience_s = config.qdrant_timeout, config.qdrant_patience
        self._whole_timeout = math.ceil(self._timeout_s)
        addresses = {
            url: address_of(url, config.qdrant_rest_port) for url in urls_of(config.qdrant_url)
        }
        self._with_rest = {url for url, address in addresses.items() if address.port is not None}
        protocols = {address.grpc_port is not None for address in addresses.values()}
        if len(protocols) > 1:
            raise StoreError(
                f"`qdrant_url` {config.qdrant_url!r}: all addresses should be of gRPC, or all of "
                "REST"
            )
        self._grpc = protocols.pop()
        clients = {url: client_of(url, address, config) for url, address in addresses.items()}
        checks_s: tuple[float | None, float] = CHECKS_S
        if len(clients) > 1:
            checks_s = CHECKS_OF_A_CLUSTER_S
        elif patient:
            checks_s = (None, 0.0)
        self._nodes = Nodes(clients, lambda client: client.collection_exists("-"), *checks_s)
        self._is_patient = patient
        # Collections whose payload indexes are there
        self._indexed: set[str] = set()

    async def _call(self, call: Attempt[T]) -> T:
        async def once() -> T:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._nodes.call(call)
            except CLIENT_ERRORS as error:
                raise store_error(error, self._url) from error

        if self._is_patient:
            return await retry_unavailable(once, self._patience_s)
        return await once()

    async def collections(self) -> list[str]:
        response = await self._call(AsyncQdrantClient.get_collections)
        return sorted(collection.name for collection in response.collections)

    async def describe(self, name: str) -> CollectionSchema | None:
        if not await self._exists(name):
            return None
        try:
            return await self._describe_existing(name)
        except StoreError:
            # A migration may have deleted it between the two calls, and given its name to a copy
            return await self._describe_existing(name) if await self._exists(name) else None

    async def _describe_existing(self, name: str) -> CollectionSchema:
        return schema_of(await self.info(name))

    async def _exists(self, name: str) -> bool:
        return bool(await self._call(lambda client: client.collection_exists(name)))

    async def create(self, name: str, schema: CollectionSchema) -> None:
        check_names(name, schema)
        tries = 0

        # `_call` may repeat this, also at another node
        async def attempt(client: AsyncQdrantClient) -> None:
            nonlocal tries
            tries += 1
            await client.create_collection(
                name, timeout=self._whole_timeout, **create_arguments(schema)
            )

        try:
            await self._call(attempt)
        except HybridTeiError:
            # An earlier try, whose answer was lost, may have created it
            existing = None if tries == 1 else await self.describe(name)
            if existing is None:
                raise
            check_fits(existing, schema, name)
        await self._index(name, {**INDEXES, **(schema.indexes or {})})
        self._indexed.add(name)

    async def index(self, name: str, indexes: Mapping[str, str]) -> None:
        """Make payload indexes and, once, those that a collection of an earlier release lacks."""
        await self._index(name, indexes)
        if name in self._indexed:
            return
        existing = (await self.info(name)).payload_schema
        # A text index of version 0.1 would change what users' filters find
        lacking = {
            key: kind for key, kind in INDEXES.items() if key not in {*existing, "text", "title"}
        }
        try:
            await self._index(name, lacking)
        except StoreUnavailable:
            raise
        except StoreError as error:
            log.warning("collection %r gets no payload indexes: %s", name, error)
        self._indexed.add(name)

    async def _index(self, name: str, indexes: Mapping[str, str]) -> None:
        for key, kind in indexes.items():
            call = partial(
                AsyncQdrantClient.create_payload_index,
                collection_name=name,
                field_name=key,
                field_schema=_field_schema(kind),
                wait=True,
            )
            await self._call(call)

    async def drop(self, name: str) -> None:
        self._indexed.discard(name)
        await self._call(lambda client: client.delete_collection(name, timeout=self._whole_timeout))

    async def annotate(self, name: str, metadata: Mapping[str, Any]) -> None:
        await self._call(
            lambda client: client.update_collection(
                name, metadata=dict(metadata), timeout=self._whole_timeout
            )
        )

    async def aliases(self) -> dict[str, str]:
        response = await self._call(AsyncQdrantClient.get_aliases)
        return {alias.alias_name: alias.collection_name for alias in response.aliases}

    async def alias(self, name: str, collection: str) -> None:
        if name in await self.collections():
            await self.drop(name)
        operations: list[Any] = [
            models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=name)),
            models.CreateAliasOperation(
                create_alias=models.CreateAlias(alias_name=name, collection_name=collection)
            ),
        ]
        await self._call(
            lambda client: client.update_collection_aliases(operations, timeout=self._whole_timeout)
        )

    async def upsert(
        self, name: str, points: Sequence[Stored], schema: CollectionSchema | None = None
    ) -> None:
        bytes_per_number = 4 if self._grpc else JSON_BYTES_PER_NUMBER
        for batch in await checked_batches(
            self, name, points, schema, bytes_per_number=bytes_per_number
        ):
            await self.index(name, {})
            await self._upsert_batch(name, batch)

    async def _upsert_batch(self, name: str, batch: Sequence[Stored]) -> None:
        # Runs in a thread, since thousands of numbers are copied
        def make_message() -> Any:
            if not self._grpc:
                return [as_lists(point) for point in batch]
            return grpc.UpsertPoints(
                collection_name=name, wait=True, points=[grpc_point(point) for point in batch]
            )

        message = await asyncio.to_thread(make_message)

        async def send(client: AsyncQdrantClient) -> None:
            if self._grpc:
                answer = await client.grpc_points.Upsert(message, timeout=self._timeout_s)
                is_applied = answer.result.status == grpc.UpdateStatus.Completed
            else:
                result = await client.upsert(name, message, wait=True)
                is_applied = result.status == models.UpdateStatus.COMPLETED
            if not is_applied:
                # The server acknowledged the points, but did not apply them in time
                raise TimeoutError

        await self._call(send)

    async def query(self, name: str, query: Query) -> list[Stored]:
        response = await self._call(
            lambda client: client.query_points(name, **query_arguments(query))
        )
        return [stored_of(point) for point in response.points]

    async def retrieve(
        self,
        name: str,
        ids: Sequence[PointId],
        *,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> list[Stored]:
        check_ids(ids)
        parts = selectors(with_payload, with_vectors)
        return [
            stored_of(point)
            for point in await self._call(lambda client: client.retrieve(name, list(ids), **parts))
        ]

    async def scroll(
        self,
        name: str,
        *,
        limit: int,
        offset: PointId | None = None,
        scroll_filter: Filter | None = None,
        with_payload: Selector = True,
        with_vectors: Selector = False,
    ) -> tuple[list[Stored], PointId | None]:
        page: dict[str, Any] = {
            "limit": limit,
            "offset": offset,
            "scroll_filter": served_filter(scroll_filter),
        }
        parts = selectors(with_payload, with_vectors)
        answer: Any = await self._call(lambda client: client.scroll(name, **page, **parts))
        return [stored_of(point) for point in answer[0]], answer[1]

    async def count(self, name: str, count_filter: Filter | None = None) -> int:
        response = await self._call(
            lambda client: client.count(name, count_filter=served_filter(count_filter), exact=True)
        )
        return response.count

    async def delete(self, name: str, ids: Sequence[PointId]) -> None:
        check_ids(ids)
        selector = models.PointIdsList(points=list(ids))
        await self._call(lambda client: client.delete(name, selector, wait=True))

    async def set_payload(
        self, name: str, ids: Sequence[PointId], values: Mapping[str, Any]
    ) -> None:
        check_ids(ids)
        points = models.PointIdsList(points=list(ids))
        await self._call(lambda client: client.set_payload(name, dict(values), points, wait=True))

    async def info(self, name: str) -> models.CollectionInfo:
        """The server's facts about a collection: status and configuration."""
        return await self._call(lambda client: client.get_collection(name))

    async def peers(self) -> int:
        """The number of the cluster's nodes, which only REST tells; 1 for a single server. Raises
        StoreError."""
        if not self._with_rest:
            raise StoreError(
                f"`qdrant_url` {self._url!r} names no port of REST, which says it: give it as "
                "`qdrant_rest_port`"
            )

        async def ask(client: AsyncQdrantClient) -> Any:
            async with asyncio.timeout(min(PEERS_S, self._timeout_s)):
                return await client.cluster_status()

        status = await self._nodes.call(ask, among=self._with_rest)
        return len(getattr(status, "peers", ())) or 1

    async def close(self) -> None:
        await self._nodes.close()


def create_arguments(schema: CollectionSchema) -> dict[str, Any]:
    """Make the arguments of qdrant-client's `create_collection`."""
    plain = msgspec.to_builtins
    return {
        "vectors_config": {
            name: models.VectorParams(**plain(params)) for name, params in schema.vectors.items()
        },
        "sparse_vectors_config": {
            name: models.SparseVectorParams(**plain(params))
            for name, params in schema.sparse.items()
        }
        or None,
        "metadata": dict(schema.metadata) or None,
        **{name: getattr(schema, name) for name in PASSED_ON},
    }


def _field_schema(kind: str) -> Any:
    """Qdrant's settings of a payload index."""
    if kind == "text":
        return OF_WORDS
    if kind.endswith("!"):
        return TENANTS[kind](type=kind[:-1], is_tenant=True)
    return models.PayloadSchemaType(kind)


def _kind_of(index: models.PayloadIndexInfo) -> str:
    is_tenant = getattr(index.params, "is_tenant", None)
    return index.data_type.value + "!" * bool(is_tenant)


def schema_of(info: models.CollectionInfo) -> CollectionSchema:
    """The schema of an existing collection. A vector without a name gets the empty name."""
    params = info.config.params.model_dump(mode="json", exclude_none=True)
    vectors = params.get("vectors", {})
    indexes = {key: _kind_of(index) for key, index in info.payload_schema.items()}
    return CollectionSchema(
        vectors=msgspec.convert(
            {"": vectors} if "size" in vectors else vectors, dict[str, VectorParams]
        ),
        sparse=msgspec.convert(params.get("sparse_vectors", {}), dict[str, SparseVectorParams]),
        metadata=info.config.metadata or {},
        indexes=dict(sorted(indexes.items() - INDEXES.items())) or None,
        **{name: params.get(name) for name in PASSED_ON},
    )


def stored_of(point: models.ScoredPoint | models.Record) -> Stored:
    """Convert qdrant-client's point. A vector without a name gets the empty name."""
    vectors: Any = point.vector or {}
    named = vectors if isinstance(vectors, dict) else {"": vectors}
    plain = {
        name: dict(vector) if isinstance(vector, models.SparseVector) else vector
        for name, vector in named.items()
    }
    identity = point.id if isinstance(point.id, int) else str(point.id)
    return Stored(identity, point.payload or {}, plain, getattr(point, "score", 0.0))


def as_lists(point: Stored) -> models.PointStruct:
    """Convert to qdrant-client's point, with lists of Python numbers instead of arrays."""
    vectors: dict[str, Any] = {name: _listed(vector) for name, vector in point.vector.items()}
    return models.PointStruct.model_construct(id=point.id, vector=vectors, payload=point.payload)


def _listed(vector: Any) -> Any:
    if isinstance(vector, Mapping):
        return models.SparseVector.model_construct(
            **{name: np.asarray(part).tolist() for name, part in vector.items()}
        )
    return np.asarray(vector).tolist()


def selectors(payload: Selector, vectors: Selector) -> dict[str, Any]:
    """The arguments of qdrant-client for the parts of points."""
    choices: dict[str, Any] = {"with_payload": payload, "with_vectors": vectors}
    for name, choice in choices.items():
        if isinstance(choice, Mapping):
            choices[name] = models.PayloadSelectorExclude(exclude=list(choice["exclude"]))
        elif isinstance(choice, Sequence):
            choices[name] = list(choice)
    return choices


def query_arguments(query: Query) -> dict[str, Any]:
    """Make the arguments of qdrant-client's `query_points`."""
    quantization = None
    if query.oversampling is not None:
        quantization = models.QuantizationSearchParams(
            rescore=True, oversampling=query.oversampling
        )
    return {
        "query": _listed(query.vector),
        "using": query.using,
        "limit": query.limit,
        "query_filter": served_filter(query.filter),
        "search_params": models.SearchParams(exact=query.exact or None, quantization=quantization),
        "with_payload": list(query.with_payload) or False,
    }


def served_filter(plain: Filter | None) -> models.Filter | None:
    """Convert the filter to qdrant-client's."""
    if plain is None:
        return None
    return models.Filter.model_validate(msgspec.to_builtins(plain))


def grpc_point(point: Stored) -> grpc.PointStruct:
    """Make the message of a checked point with arrays as vectors."""
    vectors = {name: _vector(vector) for name, vector in point.vector.items()}
    return grpc.PointStruct(
        id=RestToGrpc.convert_extended_point_id(point.id),
        vectors=grpc.Vectors(vectors=grpc.NamedVectors(vectors=vectors)),
        payload=RestToGrpc.convert_payload(point.payload),
    )


def _vector(vector: Any) -> grpc.Vector:
    if isinstance(vector, Mapping):
        sparse = grpc.SparseVector.FromString(_packed(vector["values"]))
        sparse.indices.extend(vector["indices"].tolist())
        return grpc.Vector(sparse=sparse)
    if vector.ndim == 1:
        return grpc.Vector(dense=grpc.DenseVector.FromString(_packed(vector)))
    rows = [grpc.DenseVector.FromString(_packed(row)) for row in vector]
    return grpc.Vector(multi_dense=grpc.MultiDenseVector(vectors=rows))


def _packed(array: NDArray[Any]) -> bytes:
    body = np.ascontiguousarray(array, dtype="<f4").tobytes()
    # `data` of DenseVector, `values` of SparseVector
    return nested(1, body)
