"""Multi-vectors as bytes in the payload, and MaxSim over them in this process: Qdrant has no vectors of bits or signed bytes.

They rank candidates that other vectors found, as they do where Qdrant has them: a query of the vector `multivector` is answered
here, with candidates, payloads and vectors from the store. Alone they find nothing.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from qdrant_client import models

from hybridtei.batch import Ragged, offsets_of
from hybridtei.config import MultivectorDtype
from hybridtei.errors import InvalidInput
from hybridtei.outputs import Floats, unit
from hybridtei.store.base import MULTIVECTOR, CollectionSchema, PointId, Retriever, Selector, fill, id_of, sort_points
from hybridtei.tasks.pooling import unpacked
from hybridtei.tasks.rerank import maxsim

PACKED = "multivector_base64"  # key of the payload
DTYPE, WIDTH = "multivector_dtype", "multivector_dim"  # keys of a collection's metadata
READ_AT_ONCE = 256  # candidates whose bytes are here
MAX_FLOAT_BYTES = 64_000_000  # of their vectors as floats, unless one candidate alone has more
# Few, so that many searches at once neither hold much more than that nor fill asyncio's own pool.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="maxsim")
DEFAULT_LIMIT = 10
ALONE = (
    "the collection keeps multi-vectors as bytes of the payload: they rank candidates and find none, so they are no leg of "
    "`mode` multivector, rrf or weighted; search in mode zscore, or with `rescore`"
)


class Source(Retriever, Protocol):
    """What of a store is asked here; see `Store`."""

    async def describe(self, name: str) -> CollectionSchema | None: ...

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]: ...


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a collection keeps multi-vectors: "int8" or "binary" numbers, `width` of them a vector."""

    dtype: MultivectorDtype
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector."""
        return self.width // 8 if self.dtype == "binary" else self.width

    def vectors(self, texts: Sequence[str]) -> Ragged:
        """The unit vectors of n points' bytes in base64: n × float32[k_i, width]."""
        contents = [base64.b64decode(text) for text in texts]
        rows = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, self.row_bytes)
        offsets = offsets_of([len(content) // self.row_bytes for content in contents])
        if self.dtype == "binary":
            return Ragged(unpacked(rows, self.width), offsets)
        return Ragged(unit(rows.view(np.int8).astype(np.float32)), offsets)

    def cut(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a wider model, as bytes, cut to this width."""
        return rows[:, : self.row_bytes]


def packed_format(schema: CollectionSchema) -> PackedFormat | None:
    """The format of a collection that keeps multi-vectors in payloads; None for others."""
    dtype, width = schema.metadata.get(DTYPE), schema.metadata.get(WIDTH)
    return PackedFormat(dtype, width) if dtype in ("int8", "binary") and isinstance(width, int) else None


async def format_in(store: Source, name: str, known: Mapping[str, CollectionSchema]) -> PackedFormat | None:
    """`packed_format` of a collection whose schema is among `known`, or which the store describes."""
    schema = known.get(name) or await store.describe(name)
    return None if schema is None else packed_format(schema)


def packed_text(rows: NDArray[Any]) -> str:
    """Base64 of int8 or uint8[k, bytes]."""
    return base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()


def without_packed(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload as it was given to the store."""
    return {key: value for key, value in payload.items() if key != PACKED}


def payload_of(schema: CollectionSchema) -> Selector:
    """All of the payload but a multi-vector that lies in it."""
    return True if packed_format(schema) is None else models.PayloadSelectorExclude(exclude=[PACKED])


def uses_multivector(request: models.QueryRequest | models.Prefetch) -> bool:
    """Whether the query, or one below it, is of the multi-vector."""
    below = request.prefetch if isinstance(request.prefetch, list) else [request.prefetch] if request.prefetch else []
    return request.using == MULTIVECTOR or any(uses_multivector(one) for one in below)


async def query_packed(
    store: Source, name: str, request: models.QueryRequest, packed: PackedFormat
) -> list[models.ScoredPoint]:
    """Answer a query of the multi-vector: its prefetches, or the points of its `has_id` filter, in the order of MaxSim.

    Raises InvalidInput for one that would have to find points by itself.
    """
    if request.using != MULTIVECTOR:
        raise InvalidInput(ALONE)
    ids = await _candidates(store, name, request)
    rows = np.asarray(_vector(request.query), dtype=np.float32).reshape(-1, packed.width)
    scored: list[models.ScoredPoint] = []
    for begin in range(0, len(ids), READ_AT_ONCE):
        read = await store.retrieve(name, ids[begin : begin + READ_AT_ONCE], with_payload=[PACKED])
        scored += await asyncio.get_running_loop().run_in_executor(_THREADS, _scored, read, rows, packed)
    ranked = sort_points(scored)
    if request.score_threshold is not None:
        ranked = [point for point in ranked if point.score >= request.score_threshold]
    begin = request.offset or 0
    page = ranked[begin : begin + (DEFAULT_LIMIT if request.limit is None else request.limit)]
    payload: Any = request.with_payload or False  # a model's selector is passed on as it is
    return await fill(store, name, page, payload, request.with_vector or False)


async def _candidates(store: Source, name: str, request: models.QueryRequest) -> list[PointId]:
    """Ids, each once."""
    prefetches = request.prefetch or []
    if not prefetches:
        return _ids(request.filter)
    found: dict[PointId, None] = {}
    for prefetch in prefetches if isinstance(prefetches, list) else [prefetches]:
        found |= dict.fromkeys(map(id_of, await store.query(name, _alone(prefetch, request.filter))))
    return list(found)


def _alone(prefetch: models.Prefetch, outer: models.Filter | None) -> models.QueryRequest:
    """A prefetch as a query of its own."""
    filters = [one for one in (prefetch.filter, outer) if one is not None]
    return models.QueryRequest(
        prefetch=prefetch.prefetch,
        query=prefetch.query,
        using=prefetch.using,
        filter=models.Filter(must=list(filters)) if len(filters) > 1 else next(iter(filters), None),
        params=prefetch.params,
        score_threshold=prefetch.score_threshold,
        limit=prefetch.limit,
        with_payload=False,
    )


def _ids(only: models.Filter | None) -> list[PointId]:
    conditions = only.must if only is not None and isinstance(only.must, list) else []
    if len(conditions) == 1 and isinstance(conditions[0], models.HasIdCondition):
        return [identity if isinstance(identity, int) else str(identity) for identity in conditions[0].has_id]
    raise InvalidInput(ALONE)


def _vector(query: Any) -> Any:
    return query.nearest if isinstance(query, models.NearestQuery) else query


def _scored(records: Sequence[models.Record], rows: Floats, packed: PackedFormat) -> list[models.ScoredPoint]:
    """The scores of records that have a multi-vector."""
    found: list[models.ScoredPoint] = []
    for block in _blocks([record for record in records if (record.payload or {}).get(PACKED)], packed):
        scores = maxsim(rows, packed.vectors([_text(record) for record in block]), mean=False).tolist()
        found += [
            models.ScoredPoint.model_construct(id=record.id, score=score, version=0, payload=None, vector=None)
            for record, score in zip(block, scores, strict=True)
        ]
    return found


def _blocks(records: Sequence[models.Record], packed: PackedFormat) -> Iterator[list[models.Record]]:
    """Runs of records whose floats take `MAX_FLOAT_BYTES` at most, or of one record."""
    bytes_a_character = 24 if packed.dtype == "binary" else 3  # three bytes in four characters; 32 or 4 bytes of floats each
    block: list[models.Record] = []
    held = 0
    for record in records:
        size = bytes_a_character * len(_text(record))
        if block and held + size > MAX_FLOAT_BYTES:
            yield block
            block, held = [], 0
        block.append(record)
        held += size
    if block:
        yield block


def _text(record: models.Record) -> str:
    return str((record.payload or {})[PACKED])
