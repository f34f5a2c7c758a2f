"""`ingest --watch`: ingests again when the source has changed.

The package watchfiles (extra `watch`) tells of changes at once. Without it, or where the system
does not tell, as at its limit of inotify or for a folder that is gone, an ingest looks every few
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hybridtei.errors import HybridTeiError, LoadError
from hybridtei.retrieval.ingest.options import INTERRUPTED, Summary
from hybridtei.system.machine import require_extra

# Between two looks whether the source is still the folder that is watched
LOOK_MS = 500


def watch(
    ingest: Callable[[], Summary],
    source: Path,
    own: Sequence[Path],
    *,
    seconds: float,
    show: Callable[[Summary], None],
    complain: Callable[[str], None],
) -> int:
    """Ingest, and again after each change, until a signal. Return the exit status. `own`: what an
    ingest writes. `show`: gets the summaries of the first round and of those that changed
    something. `complain`: gets errors, but not twice in a row. Raises those of the first round."""
    last, quarantined = "", 0
    for number, _ in enumerate(_rounds(source, own, seconds, complain)):
        try:
            summary = ingest()
        except (HybridTeiError, OSError) as error:
            if not number:
                raise
            if str(error) != last:
                complain(str(error))
            last = str(error)
            continue
        last, stats = "", summary.stats
        changes = stats.documents + stats.documents_deleted
        if not number or changes or stats.quarantined != quarantined:
            show(summary)
        quarantined = stats.quarantined
        if stats.stopped:
            break
    return INTERRUPTED


def _rounds(
    source: Path, own: Sequence[Path], seconds: float, complain: Callable[[str], None]
) -> Iterator[None]:
    """Yield at once, and when the source may have changed; without notices of the system, every
    `seconds`."""
    last = ""
    while True:
        try:
            yield from _changes(source, own)
        except (LoadError, OSError, RuntimeError) as error:
            if str(error) != last:
                complain(f"{error}: looking every {seconds:g} s instead")
            last = str(error)
            yield
            time.sleep(seconds)


def _changes(source: Path, own: Sequence[Path]) -> Iterator[None]:
    require_extra("watch", "watchfiles")
    from watchfiles import Change, DefaultFilter, watch

    number, is_first = source.stat().st_ino, True
    for changes in watch(
        source,
        watch_filter=DefaultFilter(ignore_paths=own),
        rust_timeout=LOOK_MS,
        yield_on_timeout=True,
        ignore_permission_denied=True,
    ):
        if changes or is_first:
            yield
        is_first = False
        # What has taken its place is not watched
        if source.stat().st_ino != number or (Change.deleted, str(source)) in changes:
            return
