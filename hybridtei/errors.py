"""Every error this package raises on purpose, as one tree.

HybridTeiError
├─ RequestError              the caller can fix it
│   ├─ EmptyInput            an input of no characters or no ids
│   ├─ InvalidInput          a value outside its limits
│   │   └─ InvalidDimensions the vectors have no such prefix
│   ├─ TokenizerError        the tokenizer refused the text
│   ├─ UnsupportedHead       the loaded model has no such output
│   ├─ AnswerTooLarge        what is asked for would fill the memory
│   │   └─ PayloadsTooLarge  so would the payloads that a search found
│   ├─ UnknownModel          no model of that name is ready here
│   └─ UnknownCollection     the vector store has no collection of that name
├─ Overloaded                no permit left: try again later
├─ TimedOut                  let in, and not answered in time
│   └─ AnswersUnsent         too many answers wait for clients that do not read them
├─ BackendError              the forward pass failed
│   ├─ PassOverdue           it takes longer than a pass may
│   └─ NotANumber            it gave an input a score that is no number
├─ Unhealthy                 the engine has stopped, or its last pass failed
├─ StoreError                a vector store refused or failed
│   ├─ StoreUnavailable      it is down, slow or asks to wait: worth another try
│   │   ├─ StoreAway         it does not answer
│   │   └─ StoreAtCapacity   more calls wait for it than it can answer in time
│   ├─ CollectionMismatch    a collection is there, and laid out for something else
│   └─ InvalidPoint          a point that no store should take: it was not sent
└─ LoadError                 at start only
    ├─ MissingArtifact       a file the checkpoint must have is not there
    ├─ UnsupportedArchitecture
    └─ WeightMismatch        weights and configuration disagree

The classes know no HTTP: statuses and wire names live in `server/errors.py`, in one table that a test walks.
A message says what was given, what is allowed, and which field.
"""

from __future__ import annotations

from typing import ClassVar


class HybridTeiError(Exception):
    """Root of the tree: `except HybridTeiError` catches all that this package raises on purpose.

    `limit`: the setting whose bound was reached, if it was one.
    """

    limit: ClassVar[str | None] = None


class RequestError(HybridTeiError):
    """The request is at fault; sending it again unchanged fails again."""


class EmptyInput(RequestError):
    """An input holds no characters or no ids. `place`: which one of a list, if that is known; TEI's words do not tell it."""

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place

    def named(self, field: str, shift: int = 0) -> EmptyInput:
        """With the place, from `shift` on, in the message."""
        return self if self.place is None else EmptyInput(f"`{field}[{self.place + shift}]` cannot be empty")


class InvalidInput(RequestError):
    """A value is outside its limits."""


class InvalidDimensions(InvalidInput):
    """The vectors cannot be cut to the wanted width."""


class TokenizerError(RequestError):
    """The tokenizer could not process the text."""


class UnsupportedHead(RequestError):
    """The loaded model does not produce the wanted output."""


class AnswerTooLarge(RequestError):
    """An answer with a vector for each token would hold too many numbers; nothing was computed."""

    limit = "max_answer_bytes"


class PayloadsTooLarge(AnswerTooLarge):
    """The payloads of the points that a search found take more bytes than one answer may hold."""

    limit = "max_search_bytes"


class UnknownModel(RequestError):
    """No model of that name is ready here."""


class UnknownCollection(RequestError):
    """The vector store has no collection of that name."""


class Overloaded(HybridTeiError):
    """All permits are taken; nothing was done."""

    limit = "max_concurrent_requests"

    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class TimedOut(HybridTeiError):
    """A request waited and worked for longer than it may; its place is free again."""

    limit = "request_timeout"


class AnswersUnsent(TimedOut):
    """Answers that clients do not read fill the memory that is for them; the same request may succeed later."""

    limit = "max_unsent_bytes"


class BackendError(HybridTeiError):
    """The forward pass that carried this request failed."""


class PassOverdue(BackendError):
    """The pass has not returned within its bound, and nobody waits for it any more."""

    limit = "pass_timeout"


class NotANumber(BackendError):
    """The pass gave an input a score that is no number: half precision overflowed, or the weights are broken."""

    def __init__(self, message: str = "score is NaN") -> None:
        super().__init__(message)


class Unhealthy(HybridTeiError):
    """The engine cannot serve."""

    def __init__(self) -> None:
        super().__init__("unhealthy")


class StoreError(HybridTeiError):
    """A vector store refused a call or failed at it; the same call fails again."""


class StoreUnavailable(StoreError):
    """The store is down, slow, full or asks to wait. `retry_after_s`: how long it asks for, if it says so."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreAway(StoreUnavailable):
    """Nothing answers where the store should be."""


class StoreAtCapacity(StoreUnavailable):
    """More calls wait for the store than it can answer in time; nothing was done."""

    limit = "qdrant_timeout"


class CollectionMismatch(StoreError):
    """A collection of that name is laid out for something else; the message shows the difference."""


class InvalidPoint(StoreError):
    """A point breaks a rule that stores do not all check; the message names the point, the field and the limit."""


class LoadError(HybridTeiError):
    """A model could not be loaded."""


class MissingArtifact(LoadError):
    """A file that the checkpoint must have is not there."""


class UnsupportedArchitecture(LoadError):
    """The checkpoint is of a kind this package does not serve."""


class WeightMismatch(LoadError):
    """Weights and configuration disagree."""
