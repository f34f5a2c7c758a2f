"""What an API's own server answers, where the APIs that share paths and names differ: the form of
errors and of `document`, older names of fields, and fields that change the form of an answer. Each
route has such a row beside it."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from litestar.exceptions import HTTPException
from msgspec import Meta, Struct, structs

from hybridtei.errors import ErrorType, HybridTeiError
from hybridtei.server.http.body import BodyError, SchemaError, first_fields

Request = TypeVar("Request", bound=Struct)
Document = Literal["object", "text"] | None
# The type of a field that is only in `Wire.forms`
Form = Annotated[Any, Meta(description="Refused if it asks for an answer of another form.")]


class OpenAIError(Struct, frozen=True):
    """The cause, where OpenAI's clients read it. `param`: the field that the message names."""

    message: str
    type: ErrorType
    code: str
    param: str | None


class ErrorDetail(Struct, frozen=True):
    """The cause, in the format that clients of FastAPI servers read."""

    loc: list[str]
    msg: str
    type: str


class ErrorForm(Struct, frozen=True):
    """The form of an error. A field's type tells its value: `str` is the message, `int` the status,
    and so on."""

    # False: errors of bodies are plain text
    takes_body_errors: ClassVar[bool] = True

    @classmethod
    def of(cls, error: Exception) -> tuple[int, Struct]:
        """(status, body)."""
        status, message, error_type = facts_of(error)
        match = FIELD.search(message, 0, MAX_START)
        field_name = None
        if match is not None and status in (400, 422):
            field_name = match[1]
        values = {
            str: message,
            int: status,
            ErrorType: error_type,
            OpenAIError: OpenAIError(message, error_type, str(status), field_name),
            DETAILS: [ErrorDetail(["body"], message, error_type)],
        }
        return status, cls(*map(values.__getitem__, types_of(cls)))


DETAILS = list[ErrorDetail]


@cache
def types_of(form: type[Struct]) -> list[Any]:
    """The types of a struct's fields."""
    return [field.type for field in structs.fields(form)]


class ErrorResponse(ErrorForm, frozen=True):
    """Errors of TEI's routes and of hybridtei's own. Errors of a body's schema are plain text.
    Errors of unknown paths and methods, and of keys on TEI's routes, have no body."""

    takes_body_errors: ClassVar[bool] = False

    error: str
    error_type: ErrorType


class OllamaErrorResponse(ErrorResponse, frozen=True):
    """Errors of Ollama's routes: its clients read `error`, also of a body's errors."""

    takes_body_errors: ClassVar[bool] = True


class DocumentsErrorResponse(OllamaErrorResponse, frozen=True):
    """Errors of documents on a path of TEI's: as TEI, and again as infinity's client reads them."""

    detail: DETAILS


class OpenAICompatErrorResponse(ErrorForm, frozen=True):
    """Errors of OpenAI's, Cohere's and Voyage's embeddings, flat like TEI's."""

    takes_body_errors: ClassVar[bool] = False

    message: str
    code: int
    type: ErrorType


class ClientsErrorResponse(OpenAICompatErrorResponse, frozen=True):
    """Errors of routes that clients other than TEI's call: flat, and again as OpenAI's clients read
    them (`error`), and as Jina's do (`detail`)."""

    takes_body_errors: ClassVar[bool] = True

    error: OpenAIError
    detail: str


class ListedErrorResponse(OpenAICompatErrorResponse, frozen=True):
    """As `ClientsErrorResponse`, for routes of infinity's client, which fails unless `detail` is a
    list."""

    takes_body_errors: ClassVar[bool] = True

    error: OpenAIError
    detail: DETAILS


class VoyageErrorResponse(OpenAICompatErrorResponse, frozen=True):
    """As `ClientsErrorResponse` for Voyage's client, which up to 0.4.1 fails where `error` is an
    object."""

    takes_body_errors: ClassVar[bool] = True

    detail: str


# In a scope: the body
BODY = "hybridtei.body"
# A field of Voyage's API alone, which its client always sends: its requests have no name of its own
VOYAGE_FIELD = re.compile(rb'"truncation"\s*:')
# Its name in headers, and those of the libraries by which it sends
VOYAGE_AGENTS = (b"Voyage/", b"python-requests/", b"Python/")


def forget_body(scope: Any) -> None:
    """The connection keeps the scope until a garbage collection, and so the body."""
    scope.pop(BODY, None)


def error_form(scope: Any, form: Any) -> Any:
    """The form of a request's errors: Voyage's if that client sent the body, or may have sent it
    where it was not read, as for a 401 or 429."""
    if form is not ClientsErrorResponse:
        return form
    agent, body = first_fields(scope).get(b"user-agent", b""), scope.get(BODY)
    is_voyage = agent.startswith(VOYAGE_AGENTS[: 3 if body is None else 1])
    if is_voyage or VOYAGE_FIELD.search(body or b""):
        return VoyageErrorResponse
    return form


# The field that a message begins with: `input[20]` gives input. Characters where it may stand
MAX_START = 1_000
FIELD = re.compile(r"(?:target type: |field `|^(?:Input validation error: )?`)(\w+)[\[`.:]")


def facts_of(error: Exception) -> tuple[int, str, ErrorType]:
    """The status, message and type of an error, also of one that Litestar or a body raised."""
    if isinstance(error, BodyError):
        return error.status, str(error), "Overloaded" if error.status == 503 else "Validation"
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, "NotFound"
    kind = error if isinstance(error, HybridTeiError) else HybridTeiError
    return kind.http_status, kind.prefix + str(error), kind.error_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A row: what a route answers as the servers do whose clients call it. `tried`: the clients
    that read its answers in `conformance/clients`."""

    tried: str
    error: Any = ErrorResponse
    # An older name of a field -> the name that the route reads
    older: Mapping[str, str] = field(default_factory=dict)
    # A field that changes the form or kind of an answer -> the values that the route obeys. It
    # refuses others, since a client would read its answer as what it is not.
    forms: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # `document` in `results`, if the request does not tell: an object with `text`, the text, or
    # none. In `data`, which only Voyage's clients read, it is always a text.
    document: Document = None

    def read(self, request: Request) -> Request:
        """The request with its fields under today's names. Raises SchemaError for a form that the
        route does not give."""
        for name, obeyed in self.forms.items():
            value = getattr(request, name, None)
            if value is not None and value not in obeyed:
                raise SchemaError(f"{name}: expected one of {[*obeyed]}, got {reprlib.repr(value)}")
        newer: dict[str, Any] = {}
        for old, name in self.older.items():
            value = getattr(request, old, None)
            if value is not None and getattr(request, name) in (None, ""):
                newer[name] = value
        return structs.replace(request, **newer)


TEI = Wire(tried="TEI's, huggingface_hub, haystack, llama-index (TEI)")
