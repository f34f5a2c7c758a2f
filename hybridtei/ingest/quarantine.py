"""What could not be taken, and why: a file of JSON lines beside the collection, written anew by each ingest.

{"source": "data/rows.csv", "location": "line 7", "reason": "the row has 3 cells, the header 4", "excerpt": "…"}
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import orjson

from hybridtei.errors import InvalidInput
from hybridtei.ingest.chunking import Rejected

MOST_PER_SOURCE = 10_000  # of a file with a misnamed column, every row would be in it
MOST_FIRST_BYTES = 100_000


class Quarantine:
    """The file is there only if something is in it. Raises InvalidInput where a file of that name holds something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counts: Counter[str] = Counter()
        if path.exists() and not _is_quarantine(path):
            raise InvalidInput(f"{path}: holds something else than what an earlier ingest could not take; name another file")
        path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._counts.total()

    def of(self, source: str) -> int:
        """How many of a file."""
        return self._counts[source]

    def add(self, rejected: Rejected) -> None:
        """Note it; of one file, only the first 10,000 are written down."""
        self._counts[rejected.source] += 1
        count = self._counts[rejected.source]
        if count > MOST_PER_SOURCE + 1:
            return
        entry = {
            "source": rejected.source,
            "location": rejected.location,
            "reason": rejected.reason if count <= MOST_PER_SOURCE else f"and more: only {MOST_PER_SOURCE} of a file are listed",
            "excerpt": rejected.excerpt,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(orjson.dumps(entry) + b"\n")


def _is_quarantine(path: Path) -> bool:
    """By its first line, which may be torn."""
    with path.open("rb") as file:
        first = file.readline(MOST_FIRST_BYTES)
    return not first or (first.startswith(b'{"source":') and b'"location":' in first)
