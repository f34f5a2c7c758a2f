"""What came of an ingest, for people and for scripts."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from hybridtei.ingest.pipeline import Outcome
from hybridtei.ingest.progress import Tally

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Summary:
    """`place`: the store. `quarantine`: path of the file, if anything is in it. `delete_missing`: was asked for."""

    collection: str
    place: str
    tally: Tally
    outcome: Outcome
    quarantine: str | None
    delete_missing: bool = False

    @property
    def status(self) -> int:
        """0 if all that could be taken is there; 130 if it was stopped; else 1."""
        if self.outcome.stopped:
            return INTERRUPTED
        nothing = not self.tally.documents and not self.tally.skipped and self.tally.quarantined
        return 1 if nothing or self.outcome.lost or self._refused else 0

    @property
    def _refused(self) -> bool:
        """What is missing was not deleted, although that was asked for."""
        return self.delete_missing and self.outcome.missing > 0

    def as_json(self) -> str:
        """One line."""
        tally, outcome = self.tally, self.outcome
        facts = {
            "collection": self.collection,
            "store": self.place,
            "documents": tally.documents,
            "unchanged": tally.skipped,
            "quarantined": tally.quarantined,
            "quarantine": self.quarantine,
            "chunks": tally.chunks,
            "tokens": tally.tokens,
            "seconds": round(tally.seconds, 3),
            "documents_per_s": round(tally.documents_per_s, 2),
            "tokens_per_s": round(tally.tokens_per_s, 1),
            "points": outcome.points,
            "points_expected": outcome.expected,
            "documents_lost": outcome.lost,
            "documents_missing": outcome.missing,
            "documents_deleted": outcome.deleted,
            "documents_unclear": tally.unclear,
            "stopped": outcome.stopped,
        }
        return orjson.dumps(facts).decode()

    def in_words(self) -> str:
        """A few lines."""
        tally = self.tally
        lines = [
            f"{tally.documents:,} documents in {tally.chunks:,} chunks stored in {tally.seconds:,.1f} s "
            f"({tally.documents_per_s:,.1f} documents/s, {tally.tokens_per_s:,.0f} tokens/s), {tally.skipped:,} unchanged"
        ]
        if tally.quarantined:
            lines.append(f"{tally.quarantined:,} could not be taken: {self.quarantine} says why")
        lines.append(f"collection {self.collection}, {self.place}: {self._points()}")
        lines += self._missing()
        if self.outcome.stopped:
            lines.append("stopped before the end: run the same command again to go on")
        return "\n".join(lines)

    def _points(self) -> str:
        points, expected = self.outcome.points, self.outcome.expected
        if points == expected:
            return f"{points:,} points" if self.outcome.missing else f"{points:,} points, as expected"
        if points > expected:
            return f"{points:,} points, {points - expected:,} more than ingests from here put there"
        return f"{points:,} points, {expected:,} expected; {self.outcome.lost:,} documents are lost: run the same command again"

    def _missing(self) -> list[str]:
        missing, deleted, unclear = self.outcome.missing, self.outcome.deleted, self.tally.unclear
        lines = []
        if deleted:
            lines.append(f"{deleted:,} documents that left the source were deleted")
        if self._refused:
            lines.append(f"{missing:,} documents left the source and stay: it yielded none at all, so none is deleted")
        elif missing:
            lines.append(f"{missing:,} documents left the source and stay searchable: --delete-missing deletes them")
        if unclear:
            lines.append(f"{unclear:,} documents may be gone too: their files could not be read whole, so they stay")
        return lines
