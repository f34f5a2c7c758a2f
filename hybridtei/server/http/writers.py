"""Answers -> bytes: JSON or MessagePack, compressed or not, as a request's headers say.

A float32 takes five bytes of MessagePack, and no time to find its digits, where JSON takes about eleven. Answers are
compressed where it pays: every HTTP library offers gzip, wanted or not, and to compress one vector takes as long as all else
that is done for it. So gzip begins with larger bodies than zstd, which a client has to ask for.
"""

from __future__ import annotations

import base64
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.batch import Ragged
from hybridtei.outputs import Embeddings, Floats, SparseVectors

FLOAT32, ARRAY16, ARRAY32 = 0xCA, 0xDC, 0xDD
FIXED_ARRAY, FIXED_LIMIT, LIMIT_16 = 0x90, 16, 1 << 16


class Packed:
    """An answer, or part of one, that is MessagePack already. No dataclass: encoders would write its fields."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


def to_msgpack(answer: Any) -> bytes:
    """An answer as MessagePack. NaN and infinities stay."""
    return answer.body if isinstance(answer, Packed) else _ENCODER.encode(answer)


def _packed(value: Any) -> Any:
    if isinstance(value, Fragment | Written):
        return orjson.loads(to_json(value))
    if isinstance(value, Packed | Iterator):
        return msgspec.Raw(value.body) if isinstance(value, Packed) else [*value]
    if isinstance(value, np.ndarray):
        plain = value.dtype != np.float32 or value.ndim not in (1, 2) or not value.size
        return value.tolist() if plain else msgspec.Raw(_floats(value))
    if isinstance(value, np.float32):
        return msgspec.Raw(struct.pack(">Bf", FLOAT32, value))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"no MessagePack for {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)


def _floats(array: NDArray[np.float32]) -> bytes:
    """A list of numbers, or a list of lists of them. Rows differ in their numbers only, so all are encoded at once."""
    rows = array.reshape(-1, array.shape[-1])
    cells = np.empty(rows.shape, dtype=[("kind", "u1"), ("value", ">f4")])
    cells["kind"], cells["value"] = FLOAT32, rows
    head = np.frombuffer(list_head(rows.shape[1]), dtype=np.uint8)
    body = cells.view(np.uint8).reshape(len(rows), -1)
    encoded = np.hstack([np.broadcast_to(head, (len(rows), len(head))), body]).tobytes()
    return encoded if array.ndim == 1 else list_head(len(rows)) + encoded


def list_head(length: int) -> bytes:
    """The MessagePack bytes before the items of a list."""
    if length < FIXED_LIMIT:
        return bytes([FIXED_ARRAY | length])
    return struct.pack(">BH", ARRAY16, length) if length < LIMIT_16 else struct.pack(">BI", ARRAY32, length)


Pieces = Callable[[NDArray[np.int64]], list[str]]
Fragment = orjson.Fragment


class Written:
    """An answer, or part of one, that is JSON already; a whole one is not copied once more, however large it is."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


def to_json(answer: Any) -> bytes:
    """An answer as compact JSON in UTF-8; NaN and infinities become null, as TEI's do."""
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
    """The same JSON, written an item of a list at a time: for a thread, since one call would hold the GIL throughout.

    All items go into one buffer, so that a large answer is not copied as a whole.
    """
    if isinstance(answer, Written):
        return answer
    buffer = BytesIO()
    write_json(answer, buffer)
    return Written(buffer.getvalue())  # what it holds, and no copy


def write_json(answer: Any, buffer: BytesIO) -> None:
    """Write an answer, an item of a list at a time."""
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
    """Base64 of the numbers as they lie in memory, little-endian."""
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def ragged(rows: Ragged, bits: int | None = None) -> list[Any]:
    """n rows of [t_i, d] -> a list of n arrays; `bits`: of n objects, for rows of so many numbers of one bit."""
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


def sparse_tokens(vectors: SparseVectors, i: int, pieces: Pieces) -> dict[str, Any]:
    """`{"vocabulary piece": weight, …}`, heaviest first."""
    indices, values = vectors.row(i)
    order = np.argsort(-values, kind="stable")
    return dict(zip(pieces(indices[order]), values[order], strict=True))


def sparse(vectors: SparseVectors, i: int, form: str, pieces: Pieces) -> Any:
    """Row i in `form`: tei, qdrant, tokens, or ids: `{"token id": weight, …}`."""
    if form == "ids":
        indices, values = vectors.row(i)
        return dict(zip(map(str, indices.tolist()), values, strict=True))
    if form == "tokens":
        return sparse_tokens(vectors, i, pieces)
    return sparse_tei(vectors, i) if form == "tei" else sparse_qdrant(vectors, i)


def hybrid(embeddings: Embeddings, form: str, pieces: Pieces, bits: int | None = None) -> list[dict[str, Any]]:
    """One object an input, with a key for each output; `bits`: of multi-vectors, as in `ragged`."""
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


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZSTD_FROM_BYTES = 1024
GZIP_FROM_BYTES = 8192
ZSTD_LEVEL = GZIP_LEVEL = 1
GZIP_STEP = 1 << 20  # what is compressed as a whole is held three times for a moment
MAX_FIELD_BYTES = 1000
JSON_TYPES = frozenset({"application/json", "application/*", "*/*"})
MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
JSON, MSGPACK = b"application/json", b"application/msgpack"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer: MessagePack or JSON, and its content coding."""

    msgpack: bool = False
    coding: str | None = None


PLAIN = Form()
FORM: ContextVar[Form] = ContextVar("form", default=PLAIN)  # of the answer to the request at work


def negotiate(accept: bytes | None, accept_encoding: bytes | None) -> Form:
    """The form that two headers ask for. Few clients send both, and mostly the same values. A header of more than
    `MAX_FIELD_BYTES` counts as absent: it would be parsed on the event loop, before the key is checked."""
    accept, accept_encoding = _short(accept), _short(accept_encoding)
    return _negotiate(accept, accept_encoding) if accept or accept_encoding else PLAIN


def _short(value: bytes | None) -> bytes:
    return b"" if value is None or len(value) > MAX_FIELD_BYTES else value


@lru_cache(maxsize=256)
def _negotiate(accept: bytes, accept_encoding: bytes) -> Form:
    codings = _qualities(accept_encoding)
    coding = max(("zstd", "gzip"), key=lambda name: codings.get(name, 0.0))
    return Form(_prefers_msgpack(_qualities(accept)), coding if codings.get(coding, 0.0) > 0 else None)


def _qualities(value: bytes) -> dict[str, float]:
    qualities: dict[str, float] = {}
    for item in value.decode("latin-1").lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            qualities.setdefault(name, float(quality))
        except ValueError:
            qualities.setdefault(name, 0.0)
    return qualities


def _prefers_msgpack(types: Mapping[str, float]) -> bool:
    """Whether MessagePack is named before JSON, or has a higher quality."""
    ranks = {name: (quality, -place) for place, (name, quality) in enumerate(types.items())}
    packed = max((ranks[name] for name in MSGPACK_TYPES & ranks.keys()), default=None)
    plain = max((ranks[name] for name in JSON_TYPES & ranks.keys()), default=(0.0, 0))
    return packed is not None and packed[0] > 0 and packed > plain


def encode(answer: Any, form: Form) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """An answer's body, and its headers: content type, encoding, length."""
    body = to_msgpack(answer) if form.msgpack else to_json(answer)
    headers = [(b"content-type", MSGPACK if form.msgpack else JSON)]
    if form.coding is not None and len(body) >= (ZSTD_FROM_BYTES if form.coding == "zstd" else GZIP_FROM_BYTES):
        body = _compressed(body, form.coding)
        headers.append((b"content-encoding", form.coding.encode()))
    headers.append((b"content-length", b"%d" % len(body)))
    return body, headers


def _compressed(body: bytes, coding: str) -> bytes:
    if coding == "zstd":
        return zstd.compress(body, ZSTD_LEVEL)
    compressor, written = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS), BytesIO()
    written.writelines(compressor.compress(body[begin : begin + GZIP_STEP]) for begin in range(0, len(body), GZIP_STEP))
    written.write(compressor.flush())
    return written.getvalue()
