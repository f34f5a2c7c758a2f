"""Answers: to JSON, and to the client. Arrays are written without lists of Python numbers, a large
answer item by item."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
import numpy as np
import orjson
from litestar import Response
from litestar.types import ASGIApp
from numpy.typing import NDArray

from hybridtei.batch import Ragged
from hybridtei.errors import AnswersUnsent, HybridTeiError
from hybridtei.limits import Bound
from hybridtei.outputs import Embeddings, Floats, SparseVectors
from hybridtei.server.http.body import first_fields, while_connected

log = logging.getLogger(__name__)

Pieces = Callable[[NDArray[np.int64]], list[str]]
Fragment = orjson.Fragment


def to_json(answer: Any) -> bytes:
    """An answer as compact JSON in UTF-8. NaN and infinities become null, as in TEI. Bytes are JSON
    already."""
    if isinstance(answer, bytes):
        return answer
    return orjson.dumps(answer, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    # orjson passes on arrays that are not contiguous
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def piecewise(answer: Any) -> bytes:
    """The same JSON, written piece by piece: for a thread, since a single call would hold the GIL
    throughout.

    All pieces go into one buffer, so a large answer is not copied.
    """
    if isinstance(answer, bytes):
        return answer
    buffer = BytesIO()
    write_json(answer, buffer)
    # `getvalue` does not copy the contents
    return buffer.getvalue()


# The numbers of an array that are written as fast as one value
ARRAY_SHARE = 10
SCALARS = (int, float, type(None))
PIECE_ITEMS, PIECE_VALUES, PIECE_CHARACTERS = 256, 10_000, 1_000_000


def write_json(answer: Any, buffer: BytesIO) -> None:
    """Write an answer, at most about `PIECE_VALUES` values, or `PIECE_CHARACTERS` of a text, a
    call."""
    if _is_piece(answer):
        buffer.write(to_json(answer))
    elif isinstance(answer, str):
        buffer.write(b'"')
        for begin in range(0, len(answer), PIECE_CHARACTERS):
            buffer.write(to_json(answer[begin : begin + PIECE_CHARACTERS])[1:-1])
        buffer.write(b'"')
    elif isinstance(answer, dict):
        _write_items(answer.items(), dict, buffer)
    elif isinstance(answer, list):
        _write_items(answer, list, buffer)
    elif isinstance(answer, Iterator) or (isinstance(answer, np.ndarray) and answer.ndim > 1):
        buffer.write(b"[")
        for place, item in enumerate(answer):
            buffer.write(b"," if place else b"")
            write_json(item, buffer)
        buffer.write(b"]")
    else:
        buffer.write(to_json(answer))


def _write_items(items: Iterable[Any], kind: type[Any], buffer: BytesIO) -> None:
    """Write an object or a list (`kind`), as many items a call as are fast."""
    start, end = (b"{", b"}") if kind is dict else (b"[", b"]")
    remaining = iter(items)
    while piece := kind(islice(remaining, PIECE_ITEMS)):
        if _is_piece(piece):
            buffer.write(start + to_json(piece)[1:-1])
            start = b","
            continue
        for item in piece:
            buffer.write(start)
            start = b","
            if kind is dict:
                buffer.write(to_json(item) + b":")
            write_json(piece[item] if kind is dict else item, buffer)
    buffer.write(end)


def _is_piece(value: Any) -> bool:
    """True if a single call writes the value fast. It reads no more of the value than it allows."""
    # The values that may still be written, and those that are not looked at yet
    left, values = PIECE_VALUES, [value]
    while values and left > 0:
        value = values.pop()
        left -= 1
        if isinstance(value, SCALARS):
            continue
        if isinstance(value, (dict, list)):
            left -= len(value)
            if left > 0:
                values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            left -= len(value) * PIECE_VALUES // PIECE_CHARACTERS
        elif isinstance(value, np.ndarray):
            left -= value.size // ARRAY_SHARE
        elif isinstance(value, Iterator):
            return False
    return left > 0


def as_base64(row: NDArray[np.generic]) -> str:
    """Base64 of the array's memory, little-endian."""
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def ragged(rows: Ragged, bits: int | None = None) -> list[Any]:
    """n rows of [t_i, d] -> a list of n arrays. `bits`: rows of one-bit numbers, `bits` a row -> a
    list of n objects."""
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
    """Row i in `form`: tei; qdrant; ids: `{"token id": weight, …}`; tokens: `{"piece": weight, …}`,
    heaviest first."""
    indices, values = vectors.row(i)
    if form == "ids":
        return dict(zip(map(str, indices.tolist()), values, strict=True))
    if form == "tokens":
        order = np.argsort(-values, kind="stable")
        return dict(zip(pieces(indices[order]), values[order], strict=True))
    return sparse_tei(vectors, i) if form == "tei" else sparse_qdrant(vectors, i)


def hybrid(
    embeddings: Embeddings, form: str, pieces: Pieces, bits: int | None = None
) -> list[dict[str, Any]]:
    """One object an input, with a key for each output. `bits`: of multi-vectors, as in `ragged`."""
    return [_columns(embeddings, i, form, pieces, bits) for i in range(len(embeddings))]


def _columns(
    embeddings: Embeddings, i: int, form: str, pieces: Pieces, bits: int | None
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if embeddings.dense is not None:
        columns["dense"] = embeddings.dense[i]
    if embeddings.sparse is not None:
        columns["sparse"] = sparse(embeddings.sparse, i, form, pieces)
    if embeddings.multivector is not None:
        row = embeddings.multivector.row(i)
        columns["multivector"] = row if bits is None else packed(row, bits)
    return columns


def label_scores(
    labels: Sequence[str], scores: Floats, order: Iterable[int]
) -> list[dict[str, Any]]:
    """`[{"score":…,"label":…}, …]`."""
    return [{"score": scores[i], "label": labels[i]} for i in order]


# The only paths that may end in a slash, also below /m/ALIAS
ENDING_IN_SLASH = re.compile(rb"(/m/[^/]*)?(/docs)?/")


def is_path(scope: Any) -> bool:
    """False for doubled and trailing slashes, which Litestar removes from a path and TEI does
    not."""
    raw = scope["raw_path"]
    path = unquote_to_bytes(raw) if b"%" in raw else raw
    return b"//" not in path and (path[-1:] != b"/" or ENDING_IN_SLASH.fullmatch(path) is not None)


def answers_unsent(bound: Bound) -> AnswersUnsent:
    """The refusal of a bound of the bytes of answers that are encoded, or about to be, and not yet
    taken by the system."""
    return AnswersUnsent(
        f"{bound.units} bytes of answers wait for clients that do not read them, {bound.limit} "
        "are allowed (max-unsent-bytes): try again later"
    )


Headers = list[tuple[bytes, bytes]]
SLICE_BYTES = 262_144


class Origins:
    """The origins whose pages may read answers, and the CORS headers of every answer."""

    vary = (b"vary", b"origin, access-control-request-method, access-control-request-headers")

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed`: of `--cors-allow-origin`; none, or `*`: all."""
        self._any = not allowed or "*" in allowed
        self._allowed = frozenset(name.encode("latin-1", "replace") for name in allowed)

    def headers(self, origin: bytes | None) -> Headers:
        """The headers of an answer to a page of `origin`."""
        if self._any:
            return [self.vary, (b"access-control-allow-origin", b"*")]
        if origin is None or origin not in self._allowed:
            return [self.vary]
        return [self.vary, (b"access-control-allow-origin", origin)]


class Answer(Response[bytes]):
    """An answer as bytes, of a route or of an error. Litestar calls it to send it."""

    def __init__(self, status: int, headers: Headers, body: bytes = b"") -> None:
        self._status, self._headers, self._body = status, headers, body

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """Litestar calls this for errors."""
        return self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the head and the body. The body counts as unsent until the system has taken it."""
        shared, size = scope["litestar_app"].state, len(self._body)
        cors = shared.origins.headers(first_fields(scope).get(b"origin"))
        headers = [*self._headers, (b"content-length", b"%d" % size), *cors]
        shared.limits.unsent.free -= size
        try:
            await send({"type": "http.response.start", "status": self._status, "headers": headers})
            if size > SLICE_BYTES:
                await send_sliced(self._body, send)
            else:
                await send({"type": "http.response.body", "body": self._body})
        finally:
            shared.limits.unsent.give_back(size)


async def send_sliced(body: bytes, send: Any, *, more_body: bool = False) -> None:
    """`send` waits until the system took the previous slice, so no second copy of a large body is
    kept."""
    rest = memoryview(body)
    while len(rest) > SLICE_BYTES:
        await send({"type": "http.response.body", "body": rest[:SLICE_BYTES], "more_body": True})
        # Otherwise a fast client makes all others wait
        await asyncio.sleep(0)
        rest = rest[SLICE_BYTES:]
    await send({"type": "http.response.body", "body": rest, "more_body": more_body})


@dataclass(frozen=True, slots=True)
class Lines:
    """An answer of lines, sent as they are made. The first precedes the status, so an error before
    it gets its own status; a later error closes the connection. A disconnect of the client ends the
    generator."""

    headers: Headers
    lines: AsyncGenerator[bytes]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises the generator's errors before its first lines."""
        cors = scope["litestar_app"].state.origins.headers(first_fields(scope).get(b"origin"))
        disconnect = while_connected(scope)
        async with aclosing(self.lines) as lines:
            first = await anext(lines)
            await send(
                {"type": "http.response.start", "status": 200, "headers": [*self.headers, *cors]}
            )
            if scope["method"] != "HEAD":
                await send({"type": "http.response.body", "body": first, "more_body": True})
                try:
                    async for part in lines:
                        if disconnect.happened:
                            return
                        await send_sliced(part, send, more_body=True)
                except HybridTeiError as error:
                    log.error("%s is cut off: %.1000s", scope["path"], error)
                    return
        await send({"type": "http.response.body", "body": b""})
