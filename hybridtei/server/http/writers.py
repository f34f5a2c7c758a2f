"""Answers -> JSON. Arrays are written without lists of Python numbers, a large answer item by item."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.batch import Ragged
from hybridtei.outputs import Embeddings, Floats, SparseVectors

Pieces = Callable[[NDArray[np.int64]], list[str]]
Fragment = orjson.Fragment


class Written:
    """An answer, or a part of one, that is JSON already. A whole answer is not copied again."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


def to_json(answer: Any) -> bytes:
    """An answer as compact JSON in UTF-8. NaN and infinities become null, as in TEI."""
    if isinstance(answer, Written):
        return answer.body
    return orjson.dumps(answer, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # not contiguous; msgspec needs contiguous memory
        return np.ascontiguousarray(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Written):
        return Fragment(value.body)
    raise TypeError(f"no JSON for {type(value).__name__}")


def piecewise(answer: Any) -> bytes:
    """The same JSON, written item by item: for a thread, since a single call would hold the GIL throughout.

    All items go into one buffer, so a large answer is not copied.
    """
    if isinstance(answer, Written):
        return answer.body
    buffer = BytesIO()
    write_json(answer, buffer)
    return buffer.getvalue()  # its contents without a copy


def write_json(answer: Any, buffer: BytesIO) -> None:
    """Write an answer, list items one at a time."""
    if isinstance(answer, dict):
        buffer.write(b"{")
        for place, (key, value) in enumerate(answer.items()):
            buffer.write(b"," if place else b"")
            buffer.write(to_json(key))
            buffer.write(b":")
            write_json(value, buffer)
        buffer.write(b"}")
    elif isinstance(answer, list | Iterator) or (isinstance(answer, np.ndarray) and answer.ndim > 1):
        buffer.write(b"[")
        for place, item in enumerate(answer):
            buffer.write(b"," if place else b"")
            buffer.write(to_json(item))
        buffer.write(b"]")
    else:
        buffer.write(to_json(answer))


def as_base64(row: NDArray[np.generic]) -> str:
    """Base64 of the array's memory, little-endian."""
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def ragged(rows: Ragged, bits: int | None = None) -> list[Any]:
    """n rows of [t_i, d] -> a list of n arrays. `bits`: rows of one-bit numbers, `bits` a row -> a list of n objects."""
    return [*rows] if bits is None else [packed(row, bits) for row in rows]


def packed(row: NDArray[np.uint8], bits: int) -> dict[str, Any]:
    """`{"shape":[n, bits],"data":base64}` of uint8[n, ceil(bits / 8)]."""
    return {"shape": [len(row), bits], "data": as_base64(row)}


def sparse_tei(vectors: SparseVectors, i: int) -> Fragment:
    """`[{"index":…,"value":…}, …]`, ascending."""
    indices, values = vectors.row(i)
    if not len(indices):
        return Fragment(b"[]")
    pairs = zip(to_json(indices)[1:-1].split(b","), to_json(values)[1:-1].split(b","), strict=True)
    return Fragment(b"[" + b",".join([b'{"index":%b,"value":%b}' % pair for pair in pairs]) + b"]")


def sparse_qdrant(vectors: SparseVectors, i: int) -> dict[str, Any]:
    """`{"indices":[…],"values":[…]}`."""
    indices, values = vectors.row(i)
    return {"indices": indices, "values": values}


def sparse(vectors: SparseVectors, i: int, form: str, pieces: Pieces) -> Any:
    """Row i in `form`: tei; qdrant; ids: `{"token id": weight, …}`; tokens: `{"piece": weight, …}`, heaviest first."""
    indices, values = vectors.row(i)
    if form == "ids":
        return dict(zip(map(str, indices.tolist()), values, strict=True))
    if form == "tokens":
        order = np.argsort(-values, kind="stable")
        return dict(zip(pieces(indices[order]), values[order], strict=True))
    return sparse_tei(vectors, i) if form == "tei" else sparse_qdrant(vectors, i)


def hybrid(embeddings: Embeddings, form: str, pieces: Pieces, bits: int | None = None) -> list[dict[str, Any]]:
    """One object an input, with a key for each output. `bits`: of multi-vectors, as in `ragged`."""
    return [_columns(embeddings, i, form, pieces, bits) for i in range(len(embeddings))]


def _columns(embeddings: Embeddings, i: int, form: str, pieces: Pieces, bits: int | None) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if embeddings.dense is not None:
        columns["dense"] = embeddings.dense[i]
    if embeddings.sparse is not None:
        columns["sparse"] = sparse(embeddings.sparse, i, form, pieces)
    if embeddings.multivector is not None:
        row = embeddings.multivector.row(i)
        columns["multivector"] = row if bits is None else packed(row, bits)
    return columns


def label_scores(labels: Sequence[str], scores: Floats, order: Iterable[int]) -> list[dict[str, Any]]:
    """`[{"score":…,"label":…}, …]`."""
    return [{"score": scores[i], "label": labels[i]} for i in order]
