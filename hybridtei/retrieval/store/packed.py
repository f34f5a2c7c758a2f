"""Multi-vectors as bytes in the payload: Qdrant has no vectors of bits or signed bytes.

They rank candidates that other vectors found, by MaxSim that is computed here, alike for every store; they find none.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qdrant_client import models

from hybridtei.batch import Ragged, offsets_of
from hybridtei.config import MultivectorDtype
from hybridtei.inference.tasks.pooling import unpacked
from hybridtei.inference.tasks.rerank import maxsim
from hybridtei.outputs import Floats, unit
from hybridtei.retrieval.store.base import CollectionSchema, PointId, Selector, Store, Stored

PACKED = "multivector_base64"  # key of the payload
DTYPE, WIDTH = "multivector_dtype", "multivector_dim"  # keys of a collection's metadata
READ_AT_ONCE = 256  # candidates whose bytes are here
MAX_FLOAT_BYTES = 64_000_000  # of their vectors as floats, unless one candidate alone has more
# Few, so that many searches at once neither hold much more than that nor fill asyncio's own pool.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="maxsim")


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


def packed_text(rows: NDArray[Any]) -> str:
    """Base64 of int8 or uint8[k, bytes]."""
    return base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()


def without_packed(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload as it was given to the store."""
    return {key: value for key, value in payload.items() if key != PACKED}


def payload_of(schema: CollectionSchema) -> Selector:
    """All of the payload but a multi-vector that lies in it."""
    return True if packed_format(schema) is None else models.PayloadSelectorExclude(exclude=[PACKED])


async def packed_scores(
    store: Store, collection: str, ids: Sequence[PointId], rows: Floats, packed: PackedFormat
) -> dict[PointId, float]:
    """The sum over the query's rows of their best match in each point, without points that have no multi-vector."""
    scores: dict[PointId, float] = {}
    for begin in range(0, len(ids), READ_AT_ONCE):
        read = await store.retrieve(collection, ids[begin : begin + READ_AT_ONCE], with_payload=[PACKED])
        scores |= await asyncio.get_running_loop().run_in_executor(_THREADS, _scores, read, rows, packed)
    return scores


def _scores(records: Sequence[Stored], rows: Floats, packed: PackedFormat) -> dict[PointId, float]:
    scores: dict[PointId, float] = {}
    for block in _blocks([(record.id, str(record.payload[PACKED])) for record in records if record.payload], packed):
        of_block = maxsim(rows, packed.vectors([text for _, text in block]), mean=False).tolist()
        scores |= dict(zip([identity for identity, _ in block], of_block, strict=True))
    return scores


def _blocks(texts: Sequence[tuple[PointId, str]], packed: PackedFormat) -> Iterator[list[tuple[PointId, str]]]:
    """Runs of texts whose floats take `MAX_FLOAT_BYTES` at most, or of one text."""
    bytes_a_character = 24 if packed.dtype == "binary" else 3  # three bytes in four characters; 32 or 4 bytes of floats each
    block: list[tuple[PointId, str]] = []
    held = 0
    for identity, text in texts:
        size = bytes_a_character * len(text)
        if block and held + size > MAX_FLOAT_BYTES:
            yield block
            block, held = [], 0
        block.append((identity, text))
        held += size
    if block:
        yield block
