"""Options of an ingest, its progress, and its summary as text and as JSON.

The command's flags are read off `IngestOptions`, so nothing heavy is imported here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

import orjson
from msgspec import Meta

from hybridtei.retrieval.ingest.records import ReadOptions
from hybridtei.retrieval.store.query import CollectionPlan

MEGABYTE = 1e6
DEFER_INDEXING_MB = 16
INTERRUPTED = 130
NAME, FILE = {"metavar": "NAME"}, {"metavar": "FILE"}


class IngestOptions(ReadOptions, frozen=True, kw_only=True):
    """Options of an ingest. `model_named`: the user named the model; else it is the one of the server at `url`."""

    source: str
    collection: Annotated[str, Meta(description="collection to fill; made if it does not exist", extra=NAME)]
    url: Annotated[str | None, Meta(description="embed by this running hybridtei, such as http://localhost:3000")] = None
    url_api_key: Annotated[str | None, Meta(description="key of --url")] = None
    outputs: tuple[str, ...] | None = None
    chunk_tokens: Annotated[
        int | None, Meta(description="tokens of a chunk [default: what the model reads, late a quarter of it; 512 at most]")
    ] = None
    chunk_overlap: Annotated[
        int | None, Meta(description="tokens that a chunk may repeat [default: an eighth of it, none for late chunks]")
    ] = None
    chunking: Annotated[
        Literal["plain", "late"],
        Meta(description="late: read a chunk with the text around it (models that pool by mean)"),
    ] = "plain"
    no_chunking: Annotated[bool, Meta(description="one chunk a document; the model cuts longer texts")] = False
    source_name: Annotated[
        str | None,
        Meta(description="SOURCE's name in ids and payloads, independent of its path [default: its file name]", extra=NAME),
    ] = None
    quarantine: Annotated[
        str | None, Meta(description="file of rejected documents [default: NAME.quarantine.jsonl]", extra=FILE)
    ] = None
    delete_missing: Annotated[bool, Meta(description="delete documents that have left SOURCE since an earlier ingest")] = False
    dry_run: Annotated[bool, Meta(description="say what would be stored and deleted, and change nothing")] = False
    reread: Annotated[bool, Meta(description="also read files whose size, times and inode have not changed")] = False
    engine: Annotated[Literal["local", "ray"], Meta(description="where to embed: here, or in a Ray cluster")] = "local"
    ray_workers: Annotated[int | None, Meta(description="workers, a processor each [default: all of the cluster]")] = None
    ray_address: Annotated[
        str | None,
        Meta(description="Ray cluster [default: RAY_ADDRESS, else a new one on this machine]", extra={"metavar": "ADDRESS"}),
    ] = None
    defer_indexing_mb: Annotated[
        int | None, Meta(description="from this size of a run on, a server indexes after the run [default: 16]")
    ] = None
    wait_indexed: Annotated[bool, Meta(description="do not wait until a server has indexed the points")] = True
    quiet: Annotated[bool, Meta(description="show no progress")] = False
    plan: CollectionPlan = CollectionPlan()
    model_named: bool = False


@dataclass
class IngestStats:
    """Counts of an ingest so far. `documents`, `chunks`, `tokens`: stored by this run; `skipped`: stored before, unchanged.

    `unclear`: stored before, and not found in files that could not be read whole. `missing`: stored documents that the source
    no longer has, and that stay; `deleted`: those that this ingest deleted, or would have; `kept`: why they stay where
    `delete_missing` is set. `points`: in the collection at the end. `stopped`: by a signal, before the end.
    """

    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    skipped: int = 0
    quarantined: int = 0
    unclear: int = 0
    files: int = 0
    missing: int = 0
    deleted: int = 0
    kept: str | None = None
    points: int = 0
    stopped: bool = False
    _began: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    def start(self) -> None:
        """Starts the clock."""
        self._began, self._ended = time.monotonic(), None

    def stop(self) -> None:
        """Stops the clock."""
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds from start to stop, or until now."""
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def documents_per_s(self) -> float:
        """Documents stored a second, by this run."""
        return self.documents / max(self.seconds, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Tokens stored a second, by this run."""
        return self.tokens / max(self.seconds, 1e-9)


class Progress:
    """A progress bar of the bytes of the source, since the number of documents is unknown."""

    def __init__(self, total_bytes: int, *, quiet: bool) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(
            total=max(total_bytes, 1) / MEGABYTE,
            disable=quiet,
            bar_format="{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining} {postfix}",
            mininterval=0.5,
        )
        self._shown = 0.0

    def show(self, done_bytes: int, stats: IngestStats) -> None:
        """Shows `done_bytes` of the source as read and stored."""
        self._bar.set_postfix_str(line(stats), refresh=False)
        done = min(done_bytes / MEGABYTE, self._bar.total or 0.0)
        self._bar.update(max(0.0, done - self._shown))
        self._shown = max(self._shown, done)

    def close(self, *, complete: bool) -> None:
        """Closes the bar, full if the ingest is complete."""
        if complete and self._bar.total is not None:
            self._bar.update(max(0.0, self._bar.total - self._shown))
        self._bar.close()


def line(stats: IngestStats) -> str:
    """The counts in one line."""
    parts = [
        f"{stats.documents:,} documents ({stats.documents_per_s:,.1f}/s)",
        f"{stats.chunks:,} chunks",
        f"{stats.tokens_per_s:,.0f} tokens/s",
    ]
    parts += [f"{stats.skipped:,} unchanged"] if stats.skipped else []
    parts += [f"{stats.quarantined:,} quarantined"] if stats.quarantined else []
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Summary:
    """`place`: the store. `quarantine`: path of the file, if it has entries. `dry_run`: the option."""

    collection: str
    place: str
    stats: IngestStats
    quarantine: str | None
    dry_run: bool = False

    @property
    def status(self) -> int:
        """The exit status: 0 if every readable document is stored, 130 if the ingest was stopped, else 1."""
        if self.stats.stopped:
            return INTERRUPTED
        nothing = not self.stats.documents and not self.stats.skipped and self.stats.quarantined
        return 1 if nothing or self.stats.kept else 0

    def as_json(self) -> str:
        """The summary as one line of JSON."""
        stats = self.stats
        fields = {
            "collection": self.collection,
            "store": self.place,
            "documents": stats.documents,
            "unchanged": stats.skipped,
            "quarantined": stats.quarantined,
            "quarantine": self.quarantine,
            "chunks": stats.chunks,
            "tokens": stats.tokens,
            "seconds": round(stats.seconds, 3),
            "documents_per_s": round(stats.documents_per_s, 2),
            "tokens_per_s": round(stats.tokens_per_s, 1),
            "points": stats.points,
            "documents_missing": stats.missing,
            "documents_deleted": stats.deleted,
            "documents_unclear": stats.unclear,
            "stopped": stats.stopped,
            "dry_run": self.dry_run,
        }
        return orjson.dumps(fields).decode()

    def in_words(self) -> str:
        """The summary as a few lines for people."""
        stats = self.stats
        lines = [
            f"{stats.documents:,} documents in {stats.chunks:,} chunks stored in {stats.seconds:,.1f} s "
            f"({stats.documents_per_s:,.1f} documents/s, {stats.tokens_per_s:,.0f} tokens/s), {stats.skipped:,} unchanged"
        ]
        if self.dry_run:
            lines = [f"nothing was changed: {stats.documents:,} documents would be stored, {stats.skipped:,} are unchanged"]
        if stats.quarantined:
            lines.append(f"{stats.quarantined:,} could not be taken: {self.quarantine} says why")
        lines.append(f"collection {self.collection}, {self.place}: {stats.points:,} points")
        if stats.deleted:
            lines.append(f"{stats.deleted:,} documents that left the source {'would be' if self.dry_run else 'were'} deleted")
        if stats.missing:
            why = stats.kept or "--delete-missing deletes them"
            lines.append(f"{stats.missing:,} documents left the source and stay searchable: {why}")
        if stats.unclear:
            lines.append(f"{stats.unclear:,} documents may be gone too: their files could not be read whole, so they stay")
        if stats.stopped:
            lines.append("stopped before the end: run the same command again to go on")
        return "\n".join(lines)
