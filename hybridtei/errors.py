"""The tree of all errors that this package raises deliberately.

A message names the field, the value found, and the allowed values. A class says what the server
answers: status, wire name, and TEI's prefix of the message. Refusals of a
body before it is read (`BodyError` in `server/http/body.py`) are not in the tree: they have a
status and TEI's message, and only the server raises and catches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import grpc


ErrorType = Literal[
    "Unhealthy",
    "Backend",
    "Overloaded",
    "Validation",
    "Tokenizer",
    "Empty",
    "NotFound",
    "Unauthorized",
    "Forbidden",
    "Store",
]
INPUT, BACKEND = "Input validation error: ", "Backend error: "


def anchor_of(error: BaseException) -> str:
    """The section of `notebooks/errors.md`, served at `/page/errors.html`, that explains an error
    and its remedy."""
    return name_of(error).lower()


def name_of(error: BaseException) -> str:
    """The name of the nearest class of the tree, for `hybridtei explain`; "BodyError" for errors
    outside the tree."""
    return next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__), "BodyError"
    )


class HybridTeiError(Exception):
    """The root of the tree: `except HybridTeiError` catches every error that this package raises
    deliberately.

    `limit`: the setting whose bound was exceeded, or None. `label`: TEI's, in `te_request_failure`.
    """

    limit: ClassVar[str | None] = None
    http_status: ClassVar[int] = 500
    error_type: ClassVar[ErrorType] = "Backend"
    prefix: ClassVar[str] = ""
    label: ClassVar[str] = "inference"

    def __init_subclass__(cls, **wire: Any) -> None:
        for name, value in wire.items():
            setattr(cls, name, value)


class RequestError(HybridTeiError, http_status=422, error_type="Validation", label="tokenization"):
    """The request is wrong. It will fail again if sent unchanged. `place`: the index of the wrong
    input in a list, if known; TEI's messages do not name it."""

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place

    def named(self, field: str, shift: int = 0, of: str = "`inputs`") -> RequestError:
        """Return the error with `field[place + shift]` in place of `of` in its message."""
        message = str(self)
        if not message.startswith(of):
            return self
        name = field if self.place is None else f"{field}[{self.place + shift}]"
        renamed = type(self)(f"`{name}`{message.removeprefix(of)}")
        if self.place is not None:
            renamed.place = self.place + shift
        return renamed


class EmptyInput(RequestError, http_status=400, error_type="Empty", prefix=INPUT):
    """An input has no characters or no ids."""


class NoInputs(EmptyInput, prefix="", label="validation"):
    """A list of inputs is empty."""


class InvalidInput(RequestError, prefix=INPUT):
    """A value is outside its limits."""


class InvalidDimensions(InvalidInput, label="validation"):
    """The vectors cannot be cut to the requested width. `width`: theirs, which TEI's message does
    not name."""

    def __init__(self, message: str, width: int | None = None) -> None:
        super().__init__(message)
        self.width = width

    def named(self, field: str, shift: int = 0, of: str = "`inputs`") -> RequestError:
        """Return the error with the width in its message."""
        if self.width is None:
            return self
        return InvalidDimensions(f"`dimensions` should be at most {self.width}, the model's width")


class RequestRefused(InvalidInput, prefix="", label="batch_size"):
    """The server refused a whole request before reading its inputs, or because its answer grew too
    large."""


class TooManyInputs(RequestRefused):
    """A batch has more inputs than one request may have."""

    limit = "max_client_batch_size"


class TooManyTexts(RequestRefused):
    """A request of another API than TEI's has more texts than the server splits."""

    limit = "max_split_texts"


class TooManyDocuments(RequestRefused):
    """A request has more documents to rank than allowed."""

    limit = "max_rerank_documents"


class TooManyCandidates(InvalidInput):
    """A search would score more candidates than allowed."""

    limit = "max_search_points"


class TokenizerError(RequestError, error_type="Tokenizer"):
    """The tokenizer could not process the text."""


class UnsupportedHead(
    RequestError, http_status=424, error_type="Backend", prefix=BACKEND, label="model_type"
):
    """The loaded model does not produce the requested output."""


class WrongModel(UnsupportedHead, prefix=""):
    """UnsupportedHead over gRPC, without HTTP's prefix of the message."""


class AnswerTooLarge(RequestError, label="answer_size"):
    """An answer with a vector for each token would have too many numbers. Nothing was computed."""

    limit = "max_answer_bytes"


class PayloadsTooLarge(AnswerTooLarge):
    """The payloads of a search's points have more bytes than one answer may have."""

    limit = "max_search_bytes"


class UnknownModel(RequestError, http_status=404, error_type="NotFound"):
    """No model of that name is ready."""


class UnknownCollection(RequestError, http_status=404, error_type="NotFound"):
    """The vector store has no collection of that name."""


class UnknownDocument(RequestError, http_status=404, error_type="NotFound"):
    """The collection has no point or document of that id."""


class KeyNeeded(RequestError, http_status=403, error_type="Forbidden"):
    """Only a server with an API key offers this route."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"`{path}` needs a key with the role `manage`, and this server "
            "has no keys: start it with `--api-key` or `--api-key-file`"
        )


class RoleNeeded(RequestError, http_status=403, error_type="Forbidden"):
    """The key lacks the role for this route."""

    def __init__(self, role: str, name: str, roles: Sequence[str]) -> None:
        super().__init__(
            f"this needs a key with the role `{role}`; the key `{name}` has {', '.join(roles)}"
        )


class OtherOrigin(RequestError, http_status=403, error_type="Forbidden"):
    """A web page of another origin asked for `/mcp`, or for a collection of a server without an API
    key."""

    def __init__(self) -> None:
        super().__init__(
            "`origin`: pages of other origins may not use `/mcp`, nor collections of a server "
            "without a key: name the origin with --cors-allow-origin"
        )


class OtherHost(RequestError, http_status=403, error_type="Forbidden"):
    """A request for a collection names the server by a name that a stranger may own, and the server
    has no API key."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"`host`: collections are not read or written by the name {name!r} while the server "
            "has no key: start it with --api-key, or name the host with --allowed-host"
        )


class NoStore(RequestError, http_status=404, error_type="NotFound"):
    """Only a server with a vector store offers this."""

    def __init__(
        self,
        message: str = (
            "this server has no vector store: start it with --qdrant-url or --qdrant-path"
        ),
    ) -> None:
        super().__init__(message)


class NoKey(RequestError, http_status=401, error_type="Unauthorized"):
    """The request has no key, or an unknown one."""


class Ended(RequestError):
    """A gRPC call ended with a status code that HTTP lacks."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Overloaded(HybridTeiError, http_status=429, error_type="Overloaded", label="overloaded"):
    """All permits are taken. The server did no work for the request."""

    limit = "max_concurrent_requests"

    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class TokensUsed(Overloaded):
    """The key has used its tokens of a minute. The server did no work for the request.
    `retry_after_s`: until it has some again."""

    limit = "tokens_per_minute"

    def __init__(self, limit: int, retry_after_s: int) -> None:
        HybridTeiError.__init__(
            self,
            f"the key has used its {limit} tokens of a minute (tokens_per_minute); it has some "
            f"again in {retry_after_s} s",
        )
        self.retry_after_s = retry_after_s


class TimedOut(HybridTeiError, http_status=503, error_type="Overloaded", label="timeout"):
    """A request took longer from permit to answer than allowed. Its permit is free again."""

    limit = "request_timeout"


class AnswersUnsent(TimedOut):
    """Answers that clients do not read fill the memory for answers. The same request may succeed
    later."""

    limit = "max_unsent_bytes"


class BackendError(HybridTeiError, http_status=424, prefix=BACKEND):
    """The forward pass of this request failed."""


class PassOverdue(BackendError):
    """A pass took longer than its bound. All of its requests get this error."""

    limit = "pass_timeout"


class NotANumber(BackendError, prefix=""):
    """A score is NaN, or a vector is infinite or NaN: half precision overflowed, or the weights are
    broken."""

    def __init__(self, message: str = "score is NaN") -> None:
        super().__init__(message)


class PartlyFailed(BackendError):
    """Some sequences of a batch could not be computed.

    `rows`: indices of the computed sequences, ascending. `outputs`: their outputs, in that order.
    """

    def __init__(self, message: str, rows: list[int], outputs: Any) -> None:
        super().__init__(message)
        self.rows = rows
        self.outputs = outputs


class DeviceLost(BackendError):
    """The device does not respond any more: every later pass of this process would fail."""


class Unhealthy(HybridTeiError, http_status=503, error_type="Unhealthy"):
    """The engine cannot serve."""

    def __init__(self, message: str = "unhealthy") -> None:
        super().__init__(message)


class StoreError(HybridTeiError, http_status=502, error_type="Store"):
    """A vector store refused a call or failed. The same call will fail again."""


class StoreUnavailable(StoreError, http_status=503):
    """The store is down, slow, full or asks to wait. `retry_after_s`: the requested wait, or None.
    `is_counted`: the message has the number of tries, and no caller tries again."""

    def __init__(
        self, message: str, retry_after_s: float | None = None, *, is_counted: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s, self.is_counted = retry_after_s, is_counted


class StoreAway(StoreUnavailable):
    """Nothing answers at the store's address, or a proxy reports the store as unavailable."""


class StoreAtCapacity(StoreUnavailable):
    """More calls wait for the store than it can answer in time. This call was not made."""

    limit = "qdrant_timeout"


class FolderReplaced(StoreUnavailable):
    """The folder of the embedded engine was deleted or replaced while it was open. The next call
    opens what is there now."""


class UnsafeFile(StoreError, OSError):
    """A file or folder of a store or cache is a link, has several names, or belongs to another
    user. It was not opened."""


class CollectionMismatch(StoreError, http_status=409):
    """The collection has another schema. The message shows the difference."""


class InvalidPoint(StoreError, http_status=422, error_type="Validation"):
    """A point breaks a rule that not all stores check. The message names the point, the field and
    the limit."""


class NoAnswer(HybridTeiError, ConnectionError):
    """The server was away, busy or slow for too long, or another program answered. `status`: that
    program's HTTP status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LoadError(HybridTeiError):
    """A model could not be loaded."""


class MissingArtifact(LoadError):
    """A required file of the checkpoint is missing."""


class UnsupportedArchitecture(LoadError):
    """This package does not serve checkpoints of this kind."""


class WeightMismatch(LoadError):
    """Weights and configuration disagree."""


class UsageError(HybridTeiError):
    """A flag, variable or option has an invalid value, or excludes another one."""
