"""One table: exception -> status, wire name, and the words TEI puts before the message; and the bodies that say so.

A route names the struct of its errors; `error_responses` writes these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from msgspec import Struct

from hybridtei import errors
from hybridtei.errors import KeyNeeded, NoInputs, NoStore, OtherOrigin, RoleNeeded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """How an exception looks on the wire."""

    status: int
    error_type: str
    prefix: str = ""


TABLE: Mapping[type[Exception], Row] = {
    errors.EmptyInput: Row(400, "Empty", "Input validation error: "),
    NoInputs: Row(400, "Empty"),
    errors.InvalidInput: Row(422, "Validation", "Input validation error: "),
    errors.RequestRefused: Row(422, "Validation"),
    errors.TokenizerError: Row(422, "Tokenizer"),
    errors.UnsupportedHead: Row(424, "Backend", "Backend error: "),
    errors.UnknownModel: Row(404, "NotFound"),
    errors.UnknownCollection: Row(404, "NotFound"),
    NoStore: Row(404, "NotFound"),
    KeyNeeded: Row(403, "Forbidden"),
    RoleNeeded: Row(403, "Forbidden"),
    OtherOrigin: Row(403, "Forbidden"),
    errors.RequestError: Row(422, "Validation"),
    errors.Overloaded: Row(429, "Overloaded"),
    errors.TimedOut: Row(503, "Overloaded"),
    errors.BackendError: Row(424, "Backend", "Backend error: "),
    errors.NotANumber: Row(424, "Backend"),
    errors.Unhealthy: Row(503, "Unhealthy"),
    errors.StoreUnavailable: Row(503, "Store"),
    errors.CollectionMismatch: Row(409, "Store"),
    errors.InvalidPoint: Row(422, "Validation"),
    errors.StoreError: Row(502, "Store"),
    errors.LoadError: Row(500, "Backend"),
    errors.HybridTeiError: Row(500, "Backend"),
}


def row_of(error: Exception) -> Row:
    """The nearest row of the table."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), Row(500, "Backend"))


class ErrorResponse(Struct, frozen=True):
    """Every error but schema errors, which are plain text, and 401, 404 and 405, which have no body."""

    takes_body_errors: ClassVar[bool] = False  # whether a body that was refused unread is told so, too, and not in plain text

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        row, message = logged_row(error)
        return row.status, cls(message, row.error_type)  # type: ignore[arg-type]


class OpenAICompatErrorResponse(Struct, frozen=True):
    """Errors of `/v1/embeddings`, flat as TEI's."""

    takes_body_errors: ClassVar[bool] = False

    message: str
    code: int
    type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        row, message = logged_row(error)
        return row.status, cls(message, row.status, row.error_type)  # type: ignore[arg-type]


class ErrorDetail(Struct, frozen=True):
    """What was wrong, as clients of FastAPI servers read it."""

    loc: list[str]
    msg: str
    type: str


class ListedErrorResponse(OpenAICompatErrorResponse, frozen=True, kw_only=True):
    """Errors of reranking, scoring and classification beside TEI's routes."""

    detail: list[ErrorDetail]  # some clients look for this word, and infinity's fails unless it holds a list

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        row, message = logged_row(error)
        detail = [ErrorDetail(["body"], message, row.error_type)]
        return row.status, cls(message, row.status, row.error_type, detail=detail)  # type: ignore[arg-type]


def logged_row(error: Exception) -> tuple[Row, str]:
    """(row, whole message) of an error that a client is told of; the log hears of it here."""
    log.error("%.1000s", error)
    row = row_of(error)
    return row, row.prefix + str(error)
