"""How many inputs may be inside at once. A full house says so at once: nobody waits for a permit.

A request of many inputs goes through in several turns with the same permits. A few of those at once could hold them all for
minutes, so they leave a share to requests of one turn: whatever large ones are under way, a query finds a permit.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Self

from hybridtei.errors import Overloaded

SHARE_LEFT = 4  # one permit of so many is not given to requests of several turns


def most_of_turns(permits: int) -> int:
    """How many of all `permits` requests of several turns may hold together."""
    return max(1, permits - permits // SHARE_LEFT)


MAX_CHUNKS_AT_ONCE = 2
MAX_ANSWER_NUMBERS = 16_000_000  # 64 MB as float32, about three times as much as JSON: ten thousand vectors of 1,600


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a request of `inputs` inputs goes through: at most `chunk` inputs a chunk, `at_once` chunks at once, under `permits`
    permits that are held from before the first chunk until after the last. `max_numbers`: in the answer."""

    inputs: int
    chunk: int
    at_once: int
    permits: int
    max_numbers: int | None = None

    @property
    def turns(self) -> bool:
        """Whether the permits are held for several turns."""
        return self.permits < self.inputs

    @classmethod
    def whole(cls, inputs: int) -> Self:
        """One chunk, with a permit an input."""
        return cls(inputs, max(inputs, 1), 1, inputs)

    @classmethod
    def of(cls, inputs: int, *, largest: int, permits: int) -> Self:
        """For more inputs than the `largest` request may have, where all `permits` together may be fewer than that.

        As many inputs are inside at once as `MAX_CHUNKS_AT_ONCE` ordinary requests hold. The answer grows with the request, so
        it is bounded too.
        """
        if inputs <= min(largest, permits):
            return cls(inputs, max(inputs, 1), 1, inputs, MAX_ANSWER_NUMBERS)
        most = most_of_turns(permits)
        chunk = min(largest, most)
        at_once = min(MAX_CHUNKS_AT_ONCE, most // chunk)
        return cls(inputs, chunk, at_once, min(inputs, chunk * at_once), MAX_ANSWER_NUMBERS)

    def in_chunks(self, chunk: int) -> Self:
        """With the same permits, but so many inputs a chunk: for tasks whose inputs cost less than their permits."""
        return replace(self, chunk=chunk, at_once=MAX_CHUNKS_AT_ONCE)


class Admission:
    """`permits` to give; used from one thread, the event loop's."""

    def __init__(self, permits: int) -> None:
        self.permits = permits
        self._free = permits

    @property
    def free(self) -> int:
        return self._free

    @contextmanager
    def inside(self, inputs: int, *, turns: bool = False) -> Iterator[None]:
        """Hold one permit an input, maybe for several `turns`. Raises Overloaded, with nothing done, if too few are free."""
        self._check(inputs, turns)
        self._free -= inputs
        try:
            yield
        finally:
            self._free += inputs

    def _check(self, inputs: int, turns: bool) -> None:
        left = self.permits - most_of_turns(self.permits) if turns else 0
        if inputs > self.free - left:
            raise Overloaded


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
