"""How many inputs may be inside at once. A full house says so at once: nobody waits for a permit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridtei.errors import Overloaded


class Admission:
    """`permits` to give; used from one thread, the event loop's."""

    def __init__(self, permits: int) -> None:
        self._free = permits

    @property
    def free(self) -> int:
        return self._free

    @contextmanager
    def inside(self, inputs: int) -> Iterator[None]:
        """Hold one permit an input. Raises Overloaded, before anything is done, if fewer are free."""
        if inputs > self._free:
            raise Overloaded
        self._free -= inputs
        try:
            yield
        finally:
            self._free += inputs
