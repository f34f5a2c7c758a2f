"""What the engine knows of a loaded model: ids in, arrays out. No text, no request, no clock."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hybridtei.batch import PackedBatch, Padding
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind


class Backend(Protocol):
    """One loaded model on one device.

    `padding`: what costs n * max_seqlen tokens, not the sum of lengths. `busy_tokens`: a batch of so many tokens keeps the
    device busy, and more of them only make others wait. `lanes`: the threads that may call `forward` at once to good effect.
    `fills_cores`: a pass called outside a lane uses every core by itself. `forwards` counts passes of the trunk.
    """

    spec: ModelSpec
    name: str
    dtype: str
    padding: Padding
    busy_tokens: int
    lanes: tuple[LaneKind, ...]
    fills_cores: bool
    forwards: int

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """Trunk once, each head of the batch once. `use_all_cores`: nothing else waits, so the pass may use more than its own
        thread.

        Raises BackendError.
        """
        ...

    def enter_lane(self, kind: LaneKind) -> None:
        """Called once by each thread of several that will call `forward`, before it does; its priority is set by then."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Accelerated(Protocol):
    """A backend that can become faster while it serves."""

    def accelerate(self) -> None:
        """Begin to make what makes later passes faster; no pass waits for it. Called once a model is loaded and measured."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A backend whose passes are bounded by memory of its own."""

    def most_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int: ...
