"""Answers: to JSON, and to the client. Arrays are written without lists of Python numbers, a large answer item by item."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from io import BytesIO
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import orjson
from litestar import Response
from litestar.types import ASGIApp
from numpy.typing import NDArray

from hybridtei.batch import Ragged
from hybridtei.errors import HybridTeiError
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.outputs import Embeddings, Floats, SparseVectors
from hybridtei.server.context import OFFLOAD_NUMBERS, Context, Reply, headers_of
from hybridtei.server.http.connection import (
    DISCONNECT,
    SMALL_BYTES,
    ClientDisconnected,
    Disconnect,
    Unsent,
)
from hybridtei.server.routing import ENDPOINT, Endpoint

log = logging.getLogger(__name__)

T = TypeVar("T")
Pieces = Callable[[NDArray[np.int64]], list[str]]
Fragment = orjson.Fragment


def to_json(answer: Any) -> bytes:
    """An answer as compact JSON in UTF-8. NaN and infinities become null, as in TEI. Bytes are JSON already."""
    if isinstance(answer, bytes):
        return answer
    return orjson.dumps(answer, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # not contiguous; msgspec needs contiguous memory
        return np.ascontiguousarray(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def piecewise(answer: Any) -> bytes:
    """The same JSON, written item by item: for a thread, since a single call would hold the GIL throughout.

    All items go into one buffer, so a large answer is not copied.
    """
    if isinstance(answer, bytes):
        return answer
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
    elif isinstance(answer, list | Iterator) or (
        isinstance(answer, np.ndarray) and answer.ndim > 1
    ):
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


MODEL = "hybridtei.model"  # in a scope: the context that answers
SLICE_BYTES = 262_144
JSON, JSON_LINES = (b"content-type", b"application/json"), (b"content-type", b"application/jsonl")


class Answer(Response[T], Generic[T]):
    """A JSON response of type `T`, made from the coroutine that returns its reply. It waits while too many bytes of answers are
    unsent."""

    def __init__(self, work: Coroutine[Any, Any, Reply]) -> None:
        self._work = work

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """Litestar calls this to get the function that sends the answer."""
        return self._respond

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Send 200, with timing headers if a model ran. Raises the work's errors, AnswersUnsent, ClientDisconnected."""
        endpoint: Endpoint = scope["route_handler"].opt[ENDPOINT]
        work = self._work
        reply = await (
            asyncio.shield(work) if endpoint.outlives_client else while_connected(scope, work)
        )
        model: Context | None = scope.get(MODEL)
        fingerprint = None if model is None or endpoint.is_tei else model.fingerprint_header
        unsent: Unsent = scope["app"].state.limits.unsent
        estimate = reply.numbers * BYTES_PER_NUMBER
        reserved = (
            0 if estimate <= SMALL_BYTES else await while_connected(scope, unsent.room(estimate))
        )
        try:
            is_large = reply.numbers > OFFLOAD_NUMBERS
            body = (
                await asyncio.to_thread(piecewise, reply.answer)
                if is_large
                else to_json(reply.answer)
            )
            unsent.add(len(body))
        finally:
            unsent.add(-reserved)
        timing = [] if reply.usage is None else headers_of(reply.usage)
        identity = [] if fingerprint is None else [fingerprint]
        headers = [*identity, *reply.headers, *timing, JSON, (b"content-length", b"%d" % len(body))]
        del reply  # its arrays are freed
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send_body(b"" if scope["method"] == "HEAD" else body, send)
        finally:
            unsent.add(-len(body))


class Lines(Response[Any]):
    """A generator's lines as a JSON-lines response. The first line precedes the status, so an error before it gets its own
    status; a later error closes the connection."""

    def __init__(self, lines: AsyncGenerator[bytes]) -> None:
        self._lines = lines

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """Litestar calls this to get the function that sends the answer."""
        return self._respond

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises the generator's errors before its first lines. A disconnect of the client ends the generator."""
        disconnect: Disconnect = (scope.get("extensions") or {}).get(DISCONNECT) or Disconnect()
        async with aclosing(self._lines) as lines:
            first = await anext(lines)
            await send({"type": "http.response.start", "status": 200, "headers": [JSON_LINES]})
            if scope["method"] != "HEAD":
                await _send_body(first, send, ends=False)
                try:
                    async for some in lines:
                        if disconnect.happened:
                            return
                        await _send_body(some, send, ends=False)
                except HybridTeiError as error:
                    log.error("%s is cut off: %.1000s", scope["path"], error)
                    return
        await _send_body(b"", send)


async def _send_body(body: bytes, send: Any, *, ends: bool = True) -> None:
    """Send a large body in slices: `send` waits until the system took the previous slice, so no second copy is kept."""
    rest: Any = body
    if len(body) > SLICE_BYTES:
        rest = memoryview(body)
        while len(rest) > SLICE_BYTES:
            await send(
                {"type": "http.response.body", "body": rest[:SLICE_BYTES], "more_body": True}
            )
            await asyncio.sleep(0)  # otherwise a fast client makes all others wait
            rest = rest[SLICE_BYTES:]
    await send({"type": "http.response.body", "body": rest, "more_body": not ends})


async def while_connected(scope: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client disconnects first. Raises ClientDisconnected.

    ASGI servers report a disconnect only in `receive`, so each request would need a second task. `BoundedHttpProtocol` puts
    the disconnect into the scope instead. Under another server the work continues.
    """
    disconnect: Disconnect | None = (scope.get("extensions") or {}).get(DISCONNECT)
    if disconnect is None:
        return await work
    running = asyncio.current_task()
    assert running is not None
    disconnect.on_disconnect = running.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not disconnect.happened:
            raise
        running.uncancel()
        raise ClientDisconnected from None
    finally:
        disconnect.on_disconnect = None
