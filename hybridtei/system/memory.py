"""How this process asks glibc for memory, and gives back what it freed: few heaps, and one trim after a model is loaded.

glibc keeps most of what was freed, in a heap for each of many threads. What then remains are gaps too small to give back, and
the more heaps, the more of these: after 40,000 fuzzed requests five models held 85 MB more than at first with glibc's 8 heaps a
core, and 5 MB with one a core.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import PAGESIZE
from pathlib import Path

from hybridtei.system.machine import available_cores

ARENAS = "MALLOC_ARENA_MAX"  # glibc's variable for how many heaps a process may have
M_ARENA_MAX = -8  # its name in `mallopt`
MAPPED = "MALLOC_MMAP_THRESHOLD_"  # glibc's variable for the size from which a block is mapped by itself
M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1
MAPPED_BYTES = 4_000_000  # glibc raises its own bound to 32 MB: an answer that grows past that leaves a hole of its size behind
TRIMMED_BYTES = 131_072  # of glibc: from how many free bytes at its end a heap gives them back
REUSED_BYTES = 64_000_000  # more than a matrix takes
HELD = Path("/proc/self/statm")

COLLECTION = gc.get_threshold()  # as Python has it
START_OBJECTS = 50_000  # made until garbage is looked for while a program starts


def collect_seldom() -> None:
    """Look for garbage seldom while a program starts: nearly all that it makes lives as long as the process, and to look 150
    times takes a tenth of its time."""
    gc.set_threshold(START_OBJECTS, *COLLECTION[1:])


def settle() -> None:
    """Free garbage, look for it as usual from now on, and no more among what there is."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION)


_limited: set[int] = set()  # glibc's options that this process has set


def trim() -> None:
    """Have glibc give back what is free, where there is a glibc. Loading leaves copies behind that were needed for a moment:
    60 MB of a model of 90."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def arenas() -> int:
    """How many heaps a process should have: one a core, so that threads seldom wait for each other's."""
    return max(2, available_cores())


def limit_heaps() -> None:
    """To be called before the process has threads: glibc decides for good when the first one asks for memory. Who has set
    `MALLOC_ARENA_MAX` or `MALLOC_MMAP_THRESHOLD_` has decided already. Elsewhere than on glibc, nothing."""
    for variable, option, value in ((ARENAS, M_ARENA_MAX, arenas()), (MAPPED, M_MMAP_THRESHOLD, MAPPED_BYTES)):
        if variable not in os.environ:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).mallopt(option, value)
                _limited.add(option)


@contextmanager
def reused_blocks() -> Iterator[None]:
    """Keep freed blocks for the next ones meanwhile, where `limit_heaps` has each given back. A runtime that packs one matrix
    after the other otherwise spends more time on new pages than on packing. Call `trim` afterwards."""
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


def resident() -> int:
    """Bytes of physical memory that this process holds. Raises OSError where there is no such file: elsewhere than on Linux."""
    return int(HELD.read_text(encoding="ascii").split()[1]) * PAGESIZE
