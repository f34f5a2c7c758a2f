"""Whatever qdrant-client raises, as StoreUnavailable (worth another try) or StoreError, with what to do about it."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import grpc
import httpx
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hybridtei.errors import HybridTeiError, StoreAway, StoreError, StoreUnavailable

CODE = grpc.StatusCode
CAUGHT = (
    *(UnexpectedResponse, ResponseHandlingException, QdrantException, grpc.RpcError, httpx.HTTPError, TimeoutError, OSError),
    *(ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError, AssertionError),
)
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
PASSING_CODES = frozenset({CODE.UNAVAILABLE, CODE.DEADLINE_EXCEEDED, CODE.RESOURCE_EXHAUSTED, CODE.ABORTED, CODE.INTERNAL})
ADVICE = {
    400: "it does not take the request",
    401: "it wants a key: set `qdrant_api_key`",
    403: "it does not let this key do that, or a limit of its strict mode is exceeded",
    404: "it has no such collection",
    408: "it took too long: raise `qdrant_timeout`, or give it more to work with",
    409: "there is one of that name",
    413: "the request is larger than it takes: raise its `max_request_size_mb`",
    429: "it asks to slow down: send less at once, or raise its rate limits",
    500: "it failed inside, and its log says why; often its disk is full",
    507: "its disk or memory is full: free some, or add a node",
}
CODE_OF = {
    CODE.INVALID_ARGUMENT: 400,
    CODE.UNAUTHENTICATED: 401,
    CODE.PERMISSION_DENIED: 403,
    CODE.NOT_FOUND: 404,
    CODE.DEADLINE_EXCEEDED: 408,
    CODE.ALREADY_EXISTS: 409,
    CODE.RESOURCE_EXHAUSTED: 429,
    CODE.INTERNAL: 500,
}
DOWN = "it does not answer: is it running, and is the address right?"


def store_error(error: BaseException, url: str) -> HybridTeiError:
    """The error to raise instead; ours are left as they are."""
    if isinstance(error, HybridTeiError):
        return error
    where = f"Qdrant at {url}"
    if isinstance(error, ResourceExhaustedResponse):
        return StoreUnavailable(f"{where}: {ADVICE[429]}: {error}", float(max(error.retry_after_s, 0)))
    if isinstance(error, UnexpectedResponse):
        return _of_status(error, where)
    if isinstance(error, grpc.RpcError):
        return _of_code(error, where)
    return _of_transport(error, where)


def _of_transport(error: BaseException, where: str) -> StoreError:
    """No answer, or one that could not be read; qdrant-client hides the cause in `source`."""
    source = error.source if isinstance(error, ResponseHandlingException) else error
    if isinstance(source, httpx.TimeoutException | TimeoutError):
        return StoreUnavailable(f"{where}: {ADVICE[408]}")
    if isinstance(source, httpx.TransportError | OSError):
        return StoreAway(f"{where}: {DOWN} ({type(source).__name__}: {source})")
    if isinstance(error, QdrantException):  # a Retry-After that is no number
        return StoreUnavailable(f"{where}: {ADVICE[429]}: {error}")
    if isinstance(error, ResponseHandlingException):
        return StoreError(f"{where}: its answer is not Qdrant's; another service, or a version too far apart? ({source})")
    return StoreError(f"{where}: {type(source).__name__}: {source}")


def _of_status(error: UnexpectedResponse, where: str) -> StoreError:
    status = error.status_code or 0
    detail = error.content.decode(errors="replace")[:500] if error.content else error.reason_phrase
    message = f"{where}: {ADVICE.get(status, 'it refused')} (HTTP {status}: {detail})"
    if status in PASSING:
        return StoreUnavailable(message, _retry_after(error.headers))
    return StoreError(message)


def _retry_after(headers: Any) -> float | None:
    """Seconds, or a date."""
    text = headers.get("Retry-After") if headers is not None else None
    if not text:
        return None
    try:
        return max(float(text), 0.0)
    except ValueError:
        pass
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None


def _of_code(error: grpc.RpcError, where: str) -> StoreError:
    code = error.code() if hasattr(error, "code") else None
    detail = error.details() if hasattr(error, "details") else str(error)
    advice = DOWN if code == CODE.UNAVAILABLE else ADVICE.get(CODE_OF.get(code, 0), "it refused") if code else "it refused"
    message = f"{where}: {advice} (gRPC {code.name if code else 'error'}: {str(detail)[:500]})"
    if code == CODE.UNAVAILABLE:
        return StoreAway(message)
    return StoreUnavailable(message) if code in PASSING_CODES else StoreError(message)
