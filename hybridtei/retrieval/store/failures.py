"""Failures of a store: the error to raise, retries, and detection of a server that is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import httpx
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hybridtei.errors import HybridTeiError, StoreAway, StoreError, StoreUnavailable
from hybridtei.system.retries import Retries, retry_after_s

T = TypeVar("T")


async def retry_unavailable(
    attempt: Callable[[], Awaitable[T]],
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> T:
    """The attempt's result, retried after StoreUnavailable until `patience_s` have passed since the first try.

    Pauses are those of `Retries`. Raises the last StoreUnavailable with the number of tries; other errors as they come.
    """
    retries = Retries(patience_s, clock=clock, jitter=jitter)
    while True:
        try:
            return await attempt()
        except StoreUnavailable as error:
            if error.is_counted:  # by the store itself, whose patience is the user's
                raise
            pause_s = retries.pause_s(error.retry_after_s)
            if pause_s is None:
                count = "once" if retries.tries == 1 else f"{retries.tries} times"
                message = f"{error} (tried {count} in {retries.elapsed_s:.1f} s, patience {patience_s:g} s)"
                raise StoreUnavailable(message, error.retry_after_s, is_counted=True) from error
        await sleep(pause_s)


CODE = grpc.StatusCode
CLIENT_ERRORS = (
    *(UnexpectedResponse, ResponseHandlingException, QdrantException, grpc.RpcError, httpx.HTTPError, TimeoutError, OSError),
    *(ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError, AssertionError),
)
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
AWAY = frozenset({502, 503, 504})  # the server is not there, as its proxy or it itself says
ADVICE = {
    400: "it does not take the request",
    401: "it wants a key: set `qdrant_api_key`",
    403: "it does not let this key do that, or a limit of its strict mode is exceeded",
    404: "it has no such collection",
    408: "it took too long: raise `qdrant_timeout`, or give it more to work with",
    409: "there is one of that name",
    413: "the request is larger than it takes: raise its `max_request_size_mb`",
    429: "it asks to slow down: send less at once, or raise its rate limits",
    500: "it failed inside, and its log says why: a full disk, or nodes of its cluster that are away",
    507: "its disk or memory is full: free some, or add a node",
}
STATUSES = {  # of HTTP, by the codes of gRPC that mean the same
    CODE.INVALID_ARGUMENT: 400,
    CODE.UNAUTHENTICATED: 401,
    CODE.PERMISSION_DENIED: 403,
    CODE.NOT_FOUND: 404,
    CODE.DEADLINE_EXCEEDED: 408,
    CODE.ALREADY_EXISTS: 409,
    CODE.RESOURCE_EXHAUSTED: 429,
    CODE.INTERNAL: 500,
    CODE.ABORTED: 425,
    CODE.UNAVAILABLE: 503,
}
DOWN = "it does not answer: is it running, and is the address right?"


def store_error(error: BaseException, url: str) -> HybridTeiError:
    """The HybridTeiError for an error of the client; a HybridTeiError is returned as it is."""
    if isinstance(error, HybridTeiError):
        return error
    where = f"Qdrant at {url}"
    if isinstance(error, ResourceExhaustedResponse):
        return StoreUnavailable(f"{where}: {ADVICE[429]}: {error}", float(max(error.retry_after_s, 0)))
    if isinstance(error, UnexpectedResponse):
        detail = error.content.decode(errors="replace") if error.content else error.reason_phrase
        return _of_status(where, error.status_code or 0, f"HTTP {error.status_code or 0}: {detail[:500]}", error.headers)
    if isinstance(error, grpc.RpcError):
        code = error.code() if hasattr(error, "code") else None
        detail = error.details() if hasattr(error, "details") else str(error)
        advice = DOWN if code == CODE.UNAVAILABLE else None
        words = f"gRPC {code.name if code else 'error'}: {str(detail)[:500]}"
        return _of_status(where, STATUSES.get(code, 0), words, advice=advice)
    return _of_transport(error, where)


def _of_transport(error: BaseException, where: str) -> StoreError:
    """The error for no answer, or an unreadable one; qdrant-client keeps the cause in `source`."""
    source = error.source if isinstance(error, ResponseHandlingException) else error
    if isinstance(source, httpx.TimeoutException | TimeoutError) and not isinstance(source, httpx.ConnectTimeout):
        return StoreUnavailable(f"{where}: {ADVICE[408]}")
    if isinstance(source, httpx.TransportError | OSError):
        return StoreAway(f"{where}: {DOWN} ({type(source).__name__}: {source})")
    if isinstance(error, QdrantException):  # a Retry-After that is no number
        return StoreUnavailable(f"{where}: {ADVICE[429]}: {error}")
    if isinstance(error, ResponseHandlingException):
        return StoreError(f"{where}: its answer is not Qdrant's; another service, or a version too far apart? ({source})")
    return StoreError(f"{where}: {type(source).__name__}: {source}")


def _of_status(where: str, status: int, words: str, headers: Any = None, *, advice: str | None = None) -> StoreError:
    message = f"{where}: {advice or ADVICE.get(status, 'it refused')} ({words})"
    asked_s = retry_after_s(headers)
    if status in AWAY and asked_s is None:  # a node that asks to wait speaks for the cluster
        return StoreAway(message)
    if status in TRANSIENT:
        return StoreUnavailable(message, asked_s)
    return StoreError(message)


FIRST_ABSENCE_S, LONGEST_ABSENCE_S = 0.25, 2.0
CHECK_AFTER_S, CHECK_S = 1.0, 0.8  # a call to a server that hangs fails after their sum


async def answered(attempt: Callable[[], Awaitable[T]], checked: Callable[[], Awaitable[None]], after_s: float | None) -> T:
    """The attempt's result. `checked` is awaited each `after_s` until it is there; what that raises ends the attempt."""
    running = asyncio.ensure_future(attempt())
    try:
        while not (await asyncio.wait([running], timeout=after_s))[0]:
            await checked()
        return running.result()
    finally:
        running.cancel()


class _Hangs(StoreAway):
    """Found by a check."""


async def check_answers(check: Callable[[], Awaitable[object]], url: str, after_s: float, timeout_s: float) -> None:
    """Raises StoreAway unless a cheap call is answered, be it with an error. `after_s`: how long another has waited."""
    try:
        async with asyncio.timeout(timeout_s):
            await check()
    except TimeoutError as error:
        waited_s = after_s + timeout_s
        raise _Hangs(f"Qdrant at {url}: has answered nothing for {waited_s:g} s: is it running, or overloaded?") from error
    except (HybridTeiError, *CLIENT_ERRORS) as error:
        failure = store_error(error, url)
        if isinstance(failure, StoreAway):
            raise failure from error


class Availability:
    """Whether one server is available; used from one event loop. `check`: a cheap call to it."""

    def __init__(
        self,
        check: Callable[[], Awaitable[object]],
        url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        check_after_s: float = CHECK_AFTER_S,
        check_s: float = CHECK_S,
    ) -> None:
        self._check, self._url, self._clock = check, url, clock
        self._check_after_s, self._check_s = check_after_s, check_s
        self._checking: asyncio.Task[None] | None = None
        self._away: StoreAway | None = None
        self._noted_s = 0.0
        self._pause_s = 0.0
        self._resume_s = 0.0

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result. Raises StoreAway, at once where the server is known to be away, and the attempt's errors."""
        began_s = self._clock()
        self._refuse(began_s)
        try:
            result = await answered(attempt, self._checked, self._check_after_s)
        except StoreAway as error:
            if not isinstance(error, _Hangs) and await self._answers():
                self._away = None  # one collection's nodes are away
            else:
                self._note(error, began_s)
            raise
        except StoreError:
            self._away = None  # the server answered
            raise
        self._away = None
        return result

    def _refuse(self, now_s: float) -> None:
        """Raises StoreAway while the server is away, but for one call each time a pause is over."""
        if self._away is None:
            self._pause_s = 0.0
        elif now_s < self._resume_s:
            raise StoreAway(str(self._away))
        else:
            self._resume_s = now_s + self._check_after_s + self._check_s

    def _note(self, error: StoreAway, began_s: float) -> None:
        """Notes that the server is away. Concurrent calls count as one failure."""
        if self._away is not None and began_s <= self._noted_s:
            return
        self._away, self._noted_s = error, self._clock()
        self._pause_s = min(max(2 * self._pause_s, FIRST_ABSENCE_S), LONGEST_ABSENCE_S)
        self._resume_s = self._noted_s + self._pause_s

    async def _checked(self) -> None:
        """Shares one check among all slow calls. Raises StoreAway."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(check_answers(self._check, self._url, self._check_after_s, self._check_s))
            self._checking.add_done_callback(lambda check: check.cancelled() or check.exception())  # so retrieved
        await asyncio.shield(self._checking)

    async def _answers(self) -> bool:
        try:
            await self._checked()
        except StoreAway:
            return False
        return True
