"""How an ingest goes, for people: a bar on standard error with rates and what is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tqdm.auto import tqdm

MEGABYTE = 1e6


@dataclass
class Tally:
    """What has been done so far. `documents`, `chunks`, `tokens`: stored by this run; `skipped`: stored before, unchanged.

    `missing`: stored before, and no longer in files that are unchanged since they were last read. `unclear`: stored before, and
    not found in files of which something could not be read.
    """

    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    skipped: int = 0
    quarantined: int = 0
    removed_chunks: int = 0
    missing: int = 0
    unclear: int = 0
    files: int = 0
    _began: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    def start(self) -> None:
        """The first document is looked for now."""
        self._began, self._ended = time.monotonic(), None

    def stop(self) -> None:
        """The last one is stored."""
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """From start to stop, or until now."""
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def documents_per_s(self) -> float:
        """Stored by this run."""
        return self.documents / max(self.seconds, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Of the chunks stored by this run."""
        return self.tokens / max(self.seconds, 1e-9)


class Progress:
    """The bar follows the bytes of the source, since nobody knows the number of documents beforehand."""

    def __init__(self, total_bytes: int, *, quiet: bool) -> None:
        self._bar = tqdm(
            total=max(total_bytes, 1) / MEGABYTE,
            disable=quiet,
            bar_format="{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining} {postfix}",
            mininterval=0.5,
        )
        self._shown = 0.0

    def show(self, done_bytes: int, tally: Tally) -> None:
        """So many bytes of the source are behind us."""
        self._bar.set_postfix_str(line(tally), refresh=False)
        done = min(done_bytes / MEGABYTE, self._bar.total or 0.0)
        self._bar.update(max(0.0, done - self._shown))
        self._shown = max(self._shown, done)

    def close(self, *, complete: bool) -> None:
        """Leave the last line as it is."""
        if complete and self._bar.total is not None:
            self._bar.update(max(0.0, self._bar.total - self._shown))
        self._bar.close()


def line(tally: Tally) -> str:
    """A tally in one line."""
    parts = [
        f"{tally.documents:,} documents ({tally.documents_per_s:,.1f}/s)",
        f"{tally.chunks:,} chunks",
        f"{tally.tokens_per_s:,.0f} tokens/s",
    ]
    parts += [f"{tally.skipped:,} unchanged"] if tally.skipped else []
    parts += [f"{tally.quarantined:,} quarantined"] if tally.quarantined else []
    return ", ".join(parts)
