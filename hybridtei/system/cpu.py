"""How many processors this process may really use: fewer than the machine has, in a container or under `taskset`."""

from __future__ import annotations

import os
import threading
from enum import StrEnum
from math import ceil
from pathlib import Path

from hybridtei.errors import LoadError

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<microseconds> <period>", or "max <period>"
GRANTED = "HYBRIDTEI_CORES"  # set by schedulers of ours that share out a machine's processors without fences, as Ray does


def available_cores(quota_file: Path = QUOTA) -> int:
    """Return the least of the machine's processors, the affinity mask, the container's quota and HYBRIDTEI_CORES; at least
    1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = os.environ.get(GRANTED, "")
    return max(1, min(affinity, _quota(quota_file) or affinity, int(granted) if granted.isdecimal() else affinity))


def _quota(file: Path) -> int | None:
    try:
        allowed, period = file.read_text().split()[:2]
        return None if allowed == "max" else ceil(int(allowed) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


ALL = "all"
MOST_REPLICAS = 64


def cuda_devices(setting: str | None, count: int) -> list[str]:
    """torch's names of the devices, one a replica; without a setting the first. `count`: how many there are, at least one.

    Raises LoadError, naming what is wrong.
    """
    if setting is None:
        return ["cuda:0"]
    if setting == ALL:
        return [f"cuda:{number}" for number in range(count)]
    numbers = [part.strip() for part in setting.split(",")]
    for number in numbers:
        if not (number.isascii() and number.isdecimal() and int(number) < count):
            raise LoadError(f"`cuda-devices` is {setting!r}: it should name numbers from 0 to {count - 1}, or be {ALL!r}")
    if len(numbers) > MOST_REPLICAS:
        raise LoadError(f"`cuda-devices` names {len(numbers)} replicas, more than {MOST_REPLICAS}")
    return [f"cuda:{int(number)}" for number in numbers]


class LaneKind(StrEnum):
    """Which requests a lane takes: short ones, or all others."""

    EXPRESS = "express"
    BULK = "bulk"


def both_lanes(cores: int) -> tuple[LaneKind, ...]:
    """Return as many express lanes as cores, and as many bulk lanes."""
    return (LaneKind.EXPRESS,) * cores + (LaneKind.BULK,) * cores


def lower_priority(niceness: int) -> bool:
    """Lower the priority of the calling thread and those it starts. Return False where the operating system refuses."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # on Linux a thread has one of its own
    except (OSError, AttributeError):
        return False
    return True
