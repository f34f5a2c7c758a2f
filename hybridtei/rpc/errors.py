"""Errors -> gRPC statuses: one table from the error types of HTTP to gRPC's codes. The messages are those of HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from hybridtei.errors import Ended, Garbage, HybridTeiError, NoKey, WrongModel
from hybridtei.server.routing import row_of

DETAIL_BYTES = 4_000  # clients take some 8 kB of metadata, and what is not ASCII counts three times
log = logging.getLogger(__name__)

CODES: Mapping[str, grpc.StatusCode] = {
    "Unhealthy": grpc.StatusCode.UNAVAILABLE,
    "Backend": grpc.StatusCode.FAILED_PRECONDITION,
    "Overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "Validation": grpc.StatusCode.INVALID_ARGUMENT,
    "Tokenizer": grpc.StatusCode.FAILED_PRECONDITION,
    "Empty": grpc.StatusCode.INVALID_ARGUMENT,
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "Forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "Store": grpc.StatusCode.UNAVAILABLE,
}


def status_of(error: HybridTeiError) -> tuple[grpc.StatusCode, str]:
    """Return (code, details) of an error."""
    if isinstance(error, Ended):
        return error.code, str(error)
    if isinstance(error, NoKey | Garbage):  # INTERNAL: as gRPC's own documentation says
        return grpc.StatusCode.UNAUTHENTICATED if isinstance(error, NoKey) else grpc.StatusCode.INTERNAL, str(error)
    row = row_of(error)
    return CODES[row.error_type], ("" if isinstance(error, WrongModel) else row.prefix) + str(error)


@asynccontextmanager
async def abort_on_error(call: Any) -> AsyncIterator[None]:
    """End the call with the status of an error that is raised within."""
    try:
        yield
    except HybridTeiError as error:
        log.error("%.1000s", error)
        code, details = status_of(error)
        await call.abort(code, fitting(details))
    except Exception as error:
        log.critical("unforeseen error in a gRPC call", exc_info=True)
        await call.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def fitting(details: str) -> str:
    """Cut details to what fits into a trailer, which writes all but printable ASCII as three characters a byte."""
    size = 0
    for place, character in enumerate(details):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if size > DETAIL_BYTES:
            return details[:place] + "…"
    return details
