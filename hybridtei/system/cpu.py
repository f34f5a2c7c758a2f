"""How many processors this process may really use: fewer than the machine has, in a container or under `taskset`."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<microseconds> <period>", or "max <period>"
GRANTED = "HYBRIDTEI_CORES"  # set by schedulers of ours that share out a machine's processors without fences, as Ray does


def available_cores(quota_file: Path = QUOTA) -> int:
    """The least of the machine's processors, the affinity mask, the container's quota and HYBRIDTEI_CORES; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = os.environ.get(GRANTED, "")
    return max(1, min(affinity, _quota(quota_file) or affinity, int(granted) if granted.isdecimal() else affinity))


def _quota(file: Path) -> int | None:
    try:
        allowed, period = file.read_text().split()[:2]
        return None if allowed == "max" else ceil(int(allowed) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
