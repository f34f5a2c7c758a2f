"""Answers -> JSON. Here goes the server's CPU time: float32 in shortest form straight from numpy, never number by number.

An answer is plain data whose leaves may be arrays, numpy's numbers, and JSON that is written already: `Fragment`, `Written`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.outputs import Embeddings, Floats, SparseVectors
from hybridtei.ragged import Ragged

Pieces = Callable[[NDArray[np.int64]], list[str]]
Fragment = orjson.Fragment


class Written:
    """An answer, or part of one, that is JSON already; a whole one is not copied once more, however large it is."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


def to_json(answer: Any) -> bytes:
    """Compact, UTF-8; NaN and infinities become null, as TEI's do."""
    if isinstance(answer, Written):
        return answer.body
    return orjson.dumps(answer, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # a view with gaps; others need no help
        return np.ascontiguousarray(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Written):
        return Fragment(value.body)
    raise TypeError(f"no JSON for {type(value).__name__}")


def piecewise(answer: Any) -> Written:
    """The same JSON, written an item of a list at a time: for a thread, which at once would let no other run.

    All goes into one buffer, so that a large answer is not copied once more as a whole.
    """
    if isinstance(answer, Written):
        return answer
    buffer = BytesIO()
    _write(answer, buffer)
    return Written(buffer.getvalue())  # what it holds, and no copy


def _write(answer: Any, buffer: BytesIO) -> None:
    if isinstance(answer, dict):
        buffer.write(b"{")
        for place, (key, value) in enumerate(answer.items()):
            buffer.write(b"," if place else b"")
            buffer.write(to_json(key))
            buffer.write(b":")
            _write(value, buffer)
        buffer.write(b"}")
    elif isinstance(answer, list) or (isinstance(answer, np.ndarray) and answer.ndim > 1):
        buffer.write(b"[")
        for place, item in enumerate(answer):
            buffer.write(b"," if place else b"")
            buffer.write(to_json(item))
        buffer.write(b"]")
    else:
        buffer.write(to_json(answer))


def as_base64(row: NDArray[np.generic]) -> str:
    """Base64 of the numbers as they lie in memory, little-endian."""
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def ragged(rows: Ragged) -> list[Any]:
    """n × [t_i, d] -> a list of lists of vectors."""
    return [*rows]


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


def sparse_tokens(vectors: SparseVectors, i: int, pieces: Pieces) -> dict[str, Any]:
    """`{"vocabulary piece": weight, …}`, heaviest first."""
    indices, values = vectors.row(i)
    order = np.argsort(-values, kind="stable")
    return dict(zip(pieces(indices[order]), values[order], strict=True))


def sparse(vectors: SparseVectors, i: int, form: str, pieces: Pieces) -> Any:
    """Row i in the wanted form."""
    if form == "tokens":
        return sparse_tokens(vectors, i, pieces)
    return sparse_tei(vectors, i) if form == "tei" else sparse_qdrant(vectors, i)


def hybrid(embeddings: Embeddings, form: str, pieces: Pieces) -> list[dict[str, Any]]:
    """One object an input, with a key for each output."""
    return [_columns(embeddings, i, form, pieces) for i in range(len(embeddings))]


def _columns(embeddings: Embeddings, i: int, form: str, pieces: Pieces) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if embeddings.dense is not None:
        columns["dense"] = embeddings.dense[i]
    if embeddings.sparse is not None:
        columns["sparse"] = sparse(embeddings.sparse, i, form, pieces)
    if embeddings.multivector is not None:
        columns["multivector"] = embeddings.multivector.row(i)
    return columns


def scored(labels: Sequence[str], scores: Floats, order: Iterable[int]) -> list[dict[str, Any]]:
    """`[{"score":…,"label":…}, …]`."""
    return [{"score": scores[i], "label": labels[i]} for i in order]
