"""A call from its headers to its end: the key, the bounds of open calls and of their time,
`tei.v1`'s servicer, the status.

gRPC's own bound, `maximum_concurrent_rpcs`, also counts calls without a key, and its handlers wait
for a unary call's message without a timeout. So all calls are served as streams, and this module
reads their messages. Flow control, the bound of unsent bytes and the age of the connection bound a
client that reads nothing: a status would wait behind the unread answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from inspect import isasyncgenfunction
from math import inf
from traceback import clear_frames
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from hybridtei.errors import Ended, HybridTeiError, NoKey
from hybridtei.limits import HELD_BYTES, SMALL_BYTES, Bound, Holder
from hybridtei.server.context import Context, headers_of
from hybridtei.server.grpc import messages
from hybridtei.server.grpc.answers import METHODS, Method
from hybridtei.server.http.body import in_turn
from hybridtei.server.http.security import KEY, Keyring
from hybridtei.server.models import Models
from hybridtei.system.tracing import Recorder, arrived, span

# Open calls of `tei.v1`
MAX_CALLS = 2048
# Open calls of health and reflection, which need no key
MAX_KEYLESS_CALLS = 256
# Between two messages of a stream; for a whole call without a key
IDLE_SECONDS = 600.0
# Of one stream's answers that wait for the client or for an earlier answer
MAX_UNSENT_BYTES = 16_000_000
# That a stopping server waits for clients
DRAIN_SECONDS = 1.0
# Of a value of a list in a decoded message: a view of a text, and the views that a list outgrew
VALUE_BYTES = 40
# Of an error: clients take some 8 kB of trailers, where one character may be 12 bytes
DETAIL_CHARACTERS = 600

STATUS = grpc.StatusCode
CODES = {
    **dict.fromkeys(("Validation", "Empty"), STATUS.INVALID_ARGUMENT),
    **dict.fromkeys(("Backend", "Tokenizer"), STATUS.FAILED_PRECONDITION),
    **dict.fromkeys(("Unhealthy", "Store"), STATUS.UNAVAILABLE),
    "Overloaded": STATUS.RESOURCE_EXHAUSTED,
    "NotFound": STATUS.NOT_FOUND,
    "Unauthorized": STATUS.UNAUTHENTICATED,
    "Forbidden": STATUS.PERMISSION_DENIED,
}

log = logging.getLogger(__name__)
T = TypeVar("T")


def too_many_calls(bound: Bound) -> Ended:
    """The refusal of a bound of open calls."""
    return Ended(
        STATUS.RESOURCE_EXHAUSTED,
        f"{bound.limit} calls are open already",
    )


def too_large_messages(bound: Bound) -> Ended:
    """The refusal of the bound of decoded messages."""
    return Ended(
        STATUS.RESOURCE_EXHAUSTED,
        f"the messages of other calls hold {bound.units} bytes, {bound.limit} are allowed: try "
        "again later",
    )


def size_of(message: Any) -> int:
    """About the bytes of a decoded message: its texts, in two forms, and its lists' values."""
    # Older releases of protobuf lack `is_repeated`
    names = [field.name for field in message.DESCRIPTOR.fields if field.default_value == []]
    lists = [getattr(message, name) for name in names]
    return 2 * int(message.ByteSize()) + VALUE_BYTES * sum(map(len, lists))


async def heard(calls: Holder, seconds: float, client: Awaitable[T]) -> T:
    """Wait for a client. Raises Ended after `seconds`, if another call needs the place, or at a
    stop."""
    try:
        return await calls.within(seconds, client)
    except TimeoutError:
        if calls.bound.patience_s < inf:
            raise Ended(STATUS.UNAVAILABLE, "the server stops") from None
        raise Ended(STATUS.DEADLINE_EXCEEDED, "the client's next message took too long") from None


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a key uncounted. Bounds the open calls of `tei.v1` and, separately,
    calls that need no key."""

    def __init__(self, keys: Keyring, message_seconds: float, inside: Bound) -> None:
        self._keys, self._inside = keys, inside
        self._message_seconds = message_seconds
        self._keyed = Bound(MAX_CALLS, too_many_calls)
        self._keyless = Bound(MAX_KEYLESS_CALLS, too_many_calls)
        # By the full names of methods
        self._handlers: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """gRPC calls this in the call's own task after the headers. None: the method is unknown."""
        method, has_key = details.method, details.method.startswith(f"/{messages.PACKAGE}.")
        calls = self._keyed if has_key else self._keyless
        if method not in self._handlers:
            if (handler := await continuation(details)) is None:
                return None
            self._handlers[method] = _bounded(
                handler,
                calls,
                self._inside,
                self._message_seconds,
                inf if has_key else IDLE_SECONDS,
            )
        try:
            if has_key:
                self._authenticate(method, details.invocation_metadata)
        except HybridTeiError as error:
            return grpc.stream_unary_rpc_method_handler(partial(_abort, error))
        return self._handlers[method]

    def _authenticate(self, method: str, metadata: Any) -> None:
        """Raises NoKey, RoleNeeded. Every known key may call Info."""
        header = dict(metadata or ()).get("authorization", "").encode("utf-8", "replace")
        try:
            self._keys.check(header, None if method.endswith("/Info") else "infer")
        except NoKey:
            raise NoKey("No valid auth token") from None

    def drain(self) -> None:
        """End calls that wait for their clients longer than DRAIN_SECONDS."""
        self._keyed.hurry(DRAIN_SECONDS)
        self._keyless.hurry(DRAIN_SECONDS)


def _bounded(
    handler: Any, bound: Bound, inside: Bound, message_seconds: float, age_seconds: float
) -> Any:
    """Wrap a handler: bound the time of its messages, decode them in turn with those of other
    calls, and turn its errors into statuses. `inside`: of the bytes of messages. A stream of
    answers counts each message until its answer, any other call its messages until its end."""
    # A handler has one function, under its kind's name
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    behaviour: Any = next(filter(None, (getattr(handler, kind) for kind in kinds)))

    async def decoded(data: bytes, held: Holder) -> Any:
        if len(data) <= HELD_BYTES:
            return await in_turn(data, handler.request_deserializer, data)
        with inside.inside(len(data), is_large=len(data) > SMALL_BYTES):
            message = await in_turn(data, handler.request_deserializer, data)
        if not handler.response_streaming:
            held.take(size_of(message))
        return message

    async def read(call: Any, place: Holder, held: Holder) -> AsyncIterator[Any]:
        seconds = message_seconds
        while (data := await heard(place, seconds, call.read())) is not grpc.aio.EOF:
            seconds = IDLE_SECONDS if handler.response_streaming else message_seconds
            yield await decoded(data, held)

    async def answer(call: Any, place: Holder) -> Any:
        held = inside.inside(0)
        until_end(held)
        request: Any = read(call, place, held)
        if not handler.request_streaming:
            data = await heard(place, message_seconds, call.read())
            if data is grpc.aio.EOF:
                raise Ended(STATUS.INTERNAL, "the call ended without a message")
            request = await decoded(data, held)
        if not isasyncgenfunction(behaviour):
            return await behaviour(request, call)
        async for reply in behaviour(request, call):
            await call.write(reply)

    async def serve(_: Any, call: Any) -> Any:
        place = bound.inside(0)
        try:
            place.take(1)
            until_end(place)
            if age_seconds == inf:
                return await answer(call, place)
            return await heard(place, age_seconds, answer(call, place))
        except grpc.aio.InternalError as error:
            # The client has left while its answer was written
            log.debug("a call ended: %s", error)
            raise asyncio.CancelledError from None
        except grpc.aio.BaseError:
            # The call was aborted
            raise
        except Exception as error:
            await _abort(error, None, call)

    make = grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        make = grpc.stream_stream_rpc_method_handler
    # None: the bytes of a message, which `decoded` counts before it decodes them
    return make(serve, None, handler.response_serializer)


async def _abort(error: Exception, _: Any, call: Any) -> None:
    code, details = status_of(error)
    if isinstance(error, HybridTeiError | DecodeError):
        log.error("%.1000s", details)
    else:
        log.critical("unforeseen error in a gRPC call", exc_info=error)
    # A call and its abort keep each other, and this error's frames, until a garbage collection
    clear_frames(error.__traceback__)
    if len(details) > DETAIL_CHARACTERS:
        details = f"{details[:DETAIL_CHARACTERS]}…"
    try:
        await call.abort(code, details)
    except grpc.aio.InternalError:
        # The client has left
        raise asyncio.CancelledError from None


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return (code, details) of an error, with HTTP's message. Bytes that are not a message give
    INTERNAL, as in gRPC."""
    if isinstance(error, Ended):
        return error.code, str(error)
    if isinstance(error, HybridTeiError):
        return CODES[error.error_type], f"{error.prefix}{error}"
    if isinstance(error, DecodeError):
        return STATUS.INTERNAL, str(error)
    return STATUS.INTERNAL, f"internal error: {type(error).__name__}"


def until_end(holder: Holder) -> None:
    """Let a holder leave at the end of its call, with which the current task ends."""
    asyncio.current_task().add_done_callback(holder.leave)  # type: ignore[union-attr]


async def reserved(held: Holder, size: int) -> int:
    """Count an answer of about `size` bytes before it is begun, and return what was counted. A
    large one waits for room. Raises AnswersUnsent."""
    held.bound.check()
    if size <= SMALL_BYTES:
        held.add(size)
        return size
    counted = await held.bound.room(size)
    held.units += counted
    return counted


class Servicer:
    """The methods of `tei.v1`: choose the model, take permits, answer, add metadata."""

    def __init__(
        self,
        models: Models,
        unsent: Bound,
        inside: Bound,
        recorder: Recorder | None,
        keys: Keyring,
    ) -> None:
        self._models, self._unsent, self._recorder = models, unsent, recorder
        self._inside, self._keys = inside, keys
        # TEI's variable
        at_once = os.environ.get("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "")
        self._most = max(int(at_once), 1) if at_once.isdecimal() else inf

    def handlers(self) -> Iterator[grpc.GenericRpcHandler]:
        """A handler for each service of `tei.proto`."""
        for service in messages.services():
            methods = {method.name: self._handler(method) for method in service.methods}
            yield grpc.method_handlers_generic_handler(service.full_name, methods)

    def _handler(self, described: Any) -> Any:
        method = METHODS.get(described.name) or METHODS[described.name.removesuffix("Stream")]
        decode = messages.message(described.input_type.name).FromString
        if described.server_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, method), decode)
        if described.client_streaming:
            return grpc.stream_unary_rpc_method_handler(partial(self._unary, method), decode)
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, method), decode)

    def _context(self, method: Method, call: Any) -> tuple[Context, Holder]:
        """The model that answers, and the holder of the call's unsent bytes. Raises
        UnknownModel."""
        metadata = dict(call.invocation_metadata() or ())
        headers = (
            (name.encode(), value.encode())
            for name, value in metadata.items()
            if isinstance(value, str)
        )
        arrived(self._recorder, headers)
        context = self._models.choose(None, metadata.get("model"), method.capability)
        held = self._unsent.inside(0)
        until_end(held)
        return context, held

    async def _unary(self, method: Method, request: Any, call: Any) -> bytes:
        """Answer a unary call. HTTP's `x-…` headers go first, as metadata. The answer counts as
        unsent until it is sent."""
        context, held = self._context(method, call)
        counted = await reserved(held, method.estimate(context, request))
        with span(method.span):
            reply = await method.answer(context, request)
        body = bytes(reply.answer)
        held.add(len(body) - counted)
        if reply.usage is not None:
            await call.send_initial_metadata(
                [(name.decode(), value.decode()) for name, value in headers_of(reply.usage)]
            )
        return body

    async def _stream(self, method: Method, requests: AsyncIterator[Any], call: Any) -> None:
        """Answer each message of a stream, several at once, in their order."""
        context, held = self._context(method, call)
        admission = context.service.admission if method.permits else context.service.beside

        async def answer(message: Any, counted: int) -> bytes:
            size = size_of(message)
            inside = self._inside.inside(size, is_large=size > SMALL_BYTES)
            with admission.carrying(1), inside, span(method.span):
                reply = await method.answer(context, message)
            body = bytes(reply.answer)
            held.add(len(body) - counted)
            return body

        async def begin(message: Any) -> asyncio.Task[bytes]:
            counted = await reserved(held, method.estimate(context, message))
            key = KEY.get()
            with context.counting_failures():
                # The task below computes in a copy of this context
                if key is not None:
                    self._keys.count(key)
                admission.take(1, is_large=method.permits)
            task = asyncio.ensure_future(answer(message, counted))
            # A callback also runs if the task is cancelled before it begins
            task.add_done_callback(lambda _: admission.give_back(1))
            return task

        async def send(body: bytes) -> None:
            await call.write(body)
            held.add(-len(body))

        def is_full(count: int) -> bool:
            return (
                count >= min(method.most, self._most)
                or held.units >= MAX_UNSENT_BYTES
                or not self._unsent.has_room(1)
                or not admission.has_room(1, is_large=True)
            )

        await in_order(requests, begin, send, is_full)


async def in_order(
    requests: AsyncIterator[Any],
    begin: Callable[[Any], Awaitable[asyncio.Task[T]]],
    send: Callable[[T], Awaitable[object]],
    is_full: Callable[[int], bool],
) -> None:
    """Send the answers in the order of the requests. `is_full`: called with the number of begun,
    unsent answers; True: begin no more. Raises the error of the first failing request. No task
    outlives it."""
    begun: deque[asyncio.Task[T]] = deque()
    # Only one side waits at a time: `read` for room, or the loop below for a task
    changed = asyncio.Event()

    async def read() -> None:
        async for request in requests:
            while begun and is_full(len(begun)):
                changed.clear()
                await changed.wait()
            begun.append(await begin(request))
            changed.set()

    reader = asyncio.ensure_future(read())
    reader.add_done_callback(lambda _: changed.set())
    try:
        while begun or not reader.done():
            if begun:
                await send(await begun[0])
                begun.popleft()
                changed.set()
            else:
                changed.clear()
                await changed.wait()
        await reader
    finally:
        for task in (reader, *begun):
            task.cancel()
        await asyncio.gather(reader, *begun, return_exceptions=True)
