"""What an ingest left out, and what it noted of documents that it took: by reason, with a count
and one example each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_REASONS = 100
NUMBER = re.compile(r"\d[\d,.]*")


@dataclass(slots=True)
class Reason:
    """`what`: files, rows, folders, or documents that were taken. `reason`, `example`: of the
    first one."""

    what: str
    reason: str
    example: str
    count: int = 0


class Report:
    """Counts by reason. Reasons that differ only in numbers are one; those beyond the first 100
    are counted together."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], Reason] = {}

    def __iter__(self) -> Iterator[Reason]:
        return iter(sorted(self._reasons.values(), key=lambda entry: (entry.what, -entry.count)))

    def add(self, what: str, reason: str, example: str) -> None:
        key = what, NUMBER.sub("#", reason)
        if key not in self._reasons and len(self._reasons) >= MAX_REASONS:
            reason, key = "other reasons", (what, "")
        entry = self._reasons.setdefault(key, Reason(what, reason, example))
        entry.count += 1
