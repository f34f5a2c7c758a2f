"""Every error that this package raises on purpose, as one tree.

A message says what was found, what is allowed, and which field. The classes know no HTTP: `server/routing.py` maps them to
statuses and wire names, in one table that a test walks. Refusals of a body before it is read (`BodyError` in
`server/http/body.py`) are not in the tree: they hold a status and TEI's words, and only the server raises and catches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import grpc

    from hybridtei.outputs import HeadOutputs


def anchor_of(error: BaseException) -> str:
    """The section of `notebooks/errors.md`, which the server has at `/page/errors.html`, with an error's cause and cure."""
    return name_of(error).lower()


def name_of(error: BaseException) -> str:
    """The nearest class of the tree, for `hybridtei explain`; BodyError, which is not in the tree, for all other errors."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__), "BodyError")


class HybridTeiError(Exception):
    """Root of the tree: `except HybridTeiError` catches every error that this package raises on purpose.

    `limit`: the setting whose bound was exceeded, or None.
    """

    limit: ClassVar[str | None] = None


class RequestError(HybridTeiError):
    """The request is wrong, and fails again if it is sent unchanged."""


class EmptyInput(RequestError):
    """An input holds no characters or no ids. `place`: its index in a list, if known; TEI's words do not name it."""

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place

    def named(self, field: str, shift: int = 0) -> EmptyInput:
        """Return the error with `field[place + shift]` in its message."""
        return self if self.place is None else EmptyInput(f"`{field}[{self.place + shift}]` cannot be empty")


class NoInputs(EmptyInput):
    """A list of inputs holds no input."""


class InvalidInput(RequestError):
    """A value is outside its limits."""


class InvalidDimensions(InvalidInput):
    """The vectors cannot be cut to the requested width."""


class RequestRefused(InvalidInput):
    """A request was refused as a whole: before its inputs were read, or because its answer grew too large."""


class TooManyInputs(RequestRefused):
    """A batch holds more inputs than a request may."""

    limit = "max_client_batch_size"


class TooManyDocuments(RequestRefused):
    """A request holds more documents to rank than it may."""

    limit = "max_rerank_documents"


class TooManyCandidates(InvalidInput):
    """A search would score more candidates than it may."""

    limit = "max_search_points"


class TokenizerError(RequestError):
    """The tokenizer could not process the text."""


class UnsupportedHead(RequestError):
    """The loaded model does not produce the requested output."""


class WrongModel(UnsupportedHead):
    """UnsupportedHead over gRPC, without the words that HTTP puts before the message."""


class AnswerTooLarge(RequestError):
    """An answer with a vector for each token would hold too many numbers; nothing was computed."""

    limit = "max_answer_bytes"


class PayloadsTooLarge(AnswerTooLarge):
    """The payloads of the points that a search found take more bytes than one answer may hold."""

    limit = "max_search_bytes"


class UnknownModel(RequestError):
    """No model of that name is ready."""


class UnknownCollection(RequestError):
    """The vector store has no collection of that name."""


class KeyNeeded(RequestError):
    """Only a server with an API key offers this."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"`{path}` needs a key with the role `manage`, as all that loads models and moves whole collections does, and this "
            "server has no keys: start it with `--api-key` or `--api-key-file`"
        )


class RoleNeeded(RequestError):
    """The given key may not be used for this."""

    def __init__(self, role: str, name: str, roles: Sequence[str]) -> None:
        super().__init__(f"this needs a key with the role `{role}`; the key `{name}` has {', '.join(roles)}")


class OtherOrigin(RequestError):
    """A page of another origin wants to write, and the server has no key that could allow it."""

    def __init__(self) -> None:
        super().__init__(
            "`origin`: pages of other origins may not write while the server has no key: "
            "start it with --api-key, or name the origin with --cors-allow-origin"
        )


class NoStore(RequestError):
    """Only a server with a vector store offers this."""

    def __init__(self, message: str = "this server has no vector store: start it with --qdrant-url or --qdrant-path") -> None:
        super().__init__(message)


class NoKey(RequestError):
    """The request carries no key, or one that the server does not know."""


class Ended(RequestError):
    """A gRPC call ends with a code that only gRPC has."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Overloaded(HybridTeiError):
    """All permits are taken; the server did no work for the request."""

    limit = "max_concurrent_requests"

    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class TimedOut(HybridTeiError):
    """A request took longer from permit to answer than it may; its permit is free again."""

    limit = "request_timeout"


class AnswersUnsent(TimedOut):
    """Answers that clients do not read fill the memory for answers; the same request may succeed later."""

    limit = "max_unsent_bytes"


class BackendError(HybridTeiError):
    """The forward pass of this request failed."""


class PassOverdue(BackendError):
    """A pass took longer than its bound; its requests were answered with this error."""

    limit = "pass_timeout"


class NotANumber(BackendError):
    """A score is not a number: half precision overflowed, or the weights are broken."""

    def __init__(self, message: str = "score is NaN") -> None:
        super().__init__(message)


class PartlyFailed(BackendError):
    """Some sequences of a batch could not be computed.

    `rows`: indices of the computed sequences, ascending. `outputs`: their outputs, in that order.
    """

    def __init__(self, message: str, rows: list[int], outputs: HeadOutputs) -> None:
        super().__init__(message)
        self.rows = rows
        self.outputs = outputs


class DeviceLost(BackendError):
    """The device no longer responds: every later pass of this process would fail."""


class Unhealthy(HybridTeiError):
    """The engine cannot serve."""

    def __init__(self, message: str = "unhealthy") -> None:
        super().__init__(message)


class StoreError(HybridTeiError):
    """A vector store refused a call or failed at it; the same call fails again."""


class StoreUnavailable(StoreError):
    """The store is down, slow, full or asks to wait. `retry_after_s`: the wait that it asks for, or None. `is_counted`: the
    message has the number of tries, and no caller tries again."""

    def __init__(self, message: str, retry_after_s: float | None = None, *, is_counted: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s, self.is_counted = retry_after_s, is_counted


class StoreAway(StoreUnavailable):
    """Nothing answers at the store's address, or a proxy there says that the store is unavailable."""


class StoreAtCapacity(StoreUnavailable):
    """More calls wait for the store than it can answer in time; this call was not made."""

    limit = "qdrant_timeout"


class CollectionMismatch(StoreError):
    """A collection of that name has another schema; the message shows the difference."""


class InvalidPoint(StoreError):
    """A point breaks a rule that not all stores check; the message names the point, the field and the limit."""


class NoAnswer(HybridTeiError, ConnectionError):
    """A client got no answer from the server: it was away, busy or slow for too long, or another program answered. `status`:
    the HTTP status of that other answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LoadError(HybridTeiError):
    """A model could not be loaded."""


class MissingArtifact(LoadError):
    """A file that the checkpoint must have is missing."""


class UnsupportedArchitecture(LoadError):
    """This package does not serve checkpoints of this kind."""


class WeightMismatch(LoadError):
    """Weights and configuration disagree."""


class UsageError(HybridTeiError):
    """A flag, variable or option has an invalid value, or two of them exclude each other."""
