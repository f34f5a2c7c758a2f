"""Permits that several processes give out together: a full house is full for all of them.

Each process counts in a place of its own what it lets in, in memory they share, and lets in what fits the sum. So a process
that dies keeps no permit: its place is emptied for the one that follows it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

from hybridtei.engine.admission import Admission

PLACE_BYTES = 8


def shared_memory(places: int) -> int:
    """A file without a name, to be inherited: its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("permits")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, places * PLACE_BYTES)
    return descriptor


class SharedAdmission(Admission):
    """`Admission` at one of several places; used from one thread, and at one place by one process."""

    def __init__(self, permits: int, descriptor: int, place: int) -> None:
        self.permits = permits
        self._descriptor = descriptor
        self._taken = memoryview(mmap(descriptor, 0)).cast("q")
        self._place = place

    @property
    def free(self) -> int:
        return self.permits - sum(self._taken)

    @contextmanager
    def inside(self, inputs: int, *, turns: bool = False) -> Iterator[None]:
        """See `Admission.inside`."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)  # for a microsecond; the kernel frees the lock of who dies with it
        try:
            self._check(inputs, turns)
            self._taken[self._place] += inputs
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._taken[self._place] -= inputs  # nobody else writes here, so no lock

    def clear(self, place: int) -> None:
        """Nobody is at a place any more."""
        self._taken[place] = 0
