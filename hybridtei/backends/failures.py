"""How a pass fails where it does not simply fail: for some of its sequences only, or with the device. Knows no torch."""

from __future__ import annotations

from hybridtei.errors import BackendError
from hybridtei.outputs import HeadOutputs


class PartlyFailed(BackendError):
    """Some sequences of a batch could not be computed, and the others were.

    `rows`: places of those that were, ascending; `outputs`: theirs, in that order.
    """

    def __init__(self, message: str, rows: list[int] | None = None, outputs: HeadOutputs | None = None) -> None:
        super().__init__(message)
        self.rows = rows or []
        self.outputs = outputs or HeadOutputs()


class DeviceLost(BackendError):
    """The device answers nothing any more: no pass will succeed in this process, whatever is in it."""
