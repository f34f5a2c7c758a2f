"""Settings of glibc's allocator: few heaps, and one trim after a model is loaded.

glibc keeps freed memory as gaps too small to give back, in a heap for each of many threads. After
40,000 fuzzed requests, five models held 85 MB more than at first with glibc's 8 heaps per core, and
5 MB more with one heap per core.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hybridtei.system.machine import available_cores

# glibc's variable for the number of heaps
ARENAS = "MALLOC_ARENA_MAX"
# Its number in `mallopt`
M_ARENA_MAX = -8
# glibc's variable for the size from which a block gets its own mapping
MAPPED = "MALLOC_MMAP_THRESHOLD_"
M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1
# Glibc raises its bound to 32 MB; then an answer that grows past that leaves a hole of its size
MAPPED_BYTES = 4_000_000
# glibc's variable for the free bytes at its end that a heap gives back
TRIMMED_BYTES = 131_072
# Larger than any matrix
REUSED_BYTES = 64_000_000

# Python's default
COLLECTION = gc.get_threshold()
# New objects per garbage collection while a program starts
START_OBJECTS = 50_000


def collect_seldom() -> None:
    """Collect garbage rarely while a program starts: nearly all objects stay, and 150 collections
    would take a tenth of the start."""
    gc.set_threshold(START_OBJECTS, *COLLECTION[1:])


def collect_as_usual() -> None:
    """Collect garbage once, restore Python's threshold, and exclude the present objects from later
    collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION)


# The glibc options that this process has set
_limited: set[int] = set()


def trim() -> None:
    """Make glibc, if there is one, return free memory to the system. Loading a model of 90 MB
    leaves 60 MB of copies."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def arenas() -> int:
    """The number of heaps for a process: one a core, so that threads seldom wait for a heap."""
    return max(2, available_cores())


def limit_heaps() -> None:
    """Limit glibc's heaps, unless the user has set `MALLOC_ARENA_MAX` or `MALLOC_MMAP_THRESHOLD_`.
    Call it before the process has threads: glibc fixes the limit at a thread's first allocation.
    Does nothing without glibc."""
    for variable, option, value in (
        (ARENAS, M_ARENA_MAX, arenas()),
        (MAPPED, M_MMAP_THRESHOLD, MAPPED_BYTES),
    ):
        if variable not in os.environ:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).mallopt(option, value)
                _limited.add(option)


@contextmanager
def reused_blocks() -> Iterator[None]:
    """A context in which glibc reuses freed blocks, which it otherwise returns to the system after
    `limit_heaps`. A runtime that packs many matrices would spend more time on new pages than on
    packing. Call `trim` afterwards."""
    _set_thresholds(REUSED_BYTES, 4 * REUSED_BYTES)
    try:
        yield
    finally:
        _set_thresholds(MAPPED_BYTES, TRIMMED_BYTES)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    if M_MMAP_THRESHOLD in _limited:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, mapped)
            ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, trimmed)
