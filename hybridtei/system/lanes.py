"""Lanes: the threads that call a backend's `forward`, and their priority.

A forward pass cannot be interrupted, but the operating system can do it for us: express lanes run short texts at normal
priority, bulk lanes everything else at a low one, all on the same weights.
"""

from __future__ import annotations

import os
import threading
from enum import StrEnum


class LaneKind(StrEnum):
    """What a lane takes."""

    EXPRESS = "express"
    BULK = "bulk"


def both_lanes(cores: int) -> tuple[LaneKind, ...]:
    """As many express lanes as cores, and as many bulk lanes."""
    return (LaneKind.EXPRESS,) * cores + (LaneKind.BULK,) * cores


def lower_priority(niceness: int) -> bool:
    """Let the calling thread, and those it will start, give way to others. False where the operating system refuses."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # on Linux a thread has one of its own
    except (OSError, AttributeError):
        return False
    return True
