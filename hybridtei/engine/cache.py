"""Results of sequences seen before, the least recently used forgotten first, within a bound on their bytes."""

from __future__ import annotations

from collections import OrderedDict

from hybridtei.batch import Encoding, Head
from hybridtei.outputs import HeadOutputs

ENTRY_BYTES = 600  # of Python objects around the arrays of one entry


class ResultCache:
    """Not thread-safe. A text that is asked for further outputs is computed again, and kept with those."""

    def __init__(self, most_bytes: int) -> None:
        self.hits = self.misses = self.bytes = 0
        self._most = most_bytes
        self._entries: OrderedDict[bytes, tuple[frozenset[Head], HeadOutputs, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, encoding: Encoding, heads: frozenset[Head]) -> HeadOutputs | None:
        """What a pass computed for these ids, if it was asked for all of `heads` then."""
        entry = self._entries.get(encoding.key)
        if entry is None or not heads <= entry[0]:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(encoding.key)
        return entry[1].only(heads)

    def keep(self, encoding: Encoding, heads: frozenset[Head], row: HeadOutputs) -> None:
        """Remember one sequence's outputs, if there is room for them at all."""
        size = row.nbytes + len(encoding.key) + ENTRY_BYTES
        if size > self._most:
            return
        self._drop(encoding.key)
        self._entries[encoding.key] = (heads, row, size)
        self.bytes += size
        while self.bytes > self._most:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[2]
