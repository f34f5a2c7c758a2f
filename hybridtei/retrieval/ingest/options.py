"""Options of an ingest, its counts, and its summary as text and as JSON.

The command's flags are read off `IngestOptions`, so nothing heavy is imported here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import orjson
from msgspec import Struct

from hybridtei.config import MultivectorDtype, flag
from hybridtei.retrieval.ingest.report import Reason
from hybridtei.retrieval.store.query import CollectionPlan, Datatype, Quantization

MEGABYTE = 1e6
INTERRUPTED = 130
MAX_RECORD_BYTES = 1_000_000
# Bounds the number of a document's chunks
MAX_DOCUMENT_CHARACTERS = 10_000_000


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Options of reading files. `text_field`, `id_field`: names in records; None: `text`, and `_id`
    or `id`.

    A record is a line of jsonl or a row of csv or parquet. `max_file_bytes` bounds files of one
    document.
    """

    text_field: Annotated[
        str | None, flag("field of the text in jsonl, csv, parquet [default: text]", metavar="NAME")
    ] = None
    id_field: Annotated[
        str | None,
        flag("field of a record's id [default: _id or id, else the line's number]", metavar="NAME"),
    ] = None
    max_record_bytes: Annotated[int, flag("most bytes of a line or row")] = MAX_RECORD_BYTES
    max_file_bytes: int = 100_000_000
    max_document_characters: int = MAX_DOCUMENT_CHARACTERS
    max_metadata_bytes: int = 64_000
    max_id_characters: int = 512

    def as_dict(self) -> dict[str, Any]:
        """Only these fields, without a subclass's."""
        return {name: getattr(self, name) for name in ReadOptions.__struct_fields__}


class IngestOptions(ReadOptions, frozen=True, kw_only=True):
    """Options of an ingest."""

    source: str
    collection: Annotated[str, flag("collection to fill; created if missing", metavar="NAME")]
    url: Annotated[
        str | None, flag("embed by this running hybridtei, such as http://localhost:3000")
    ] = None
    url_api_key: Annotated[str | None, flag("key of --url")] = None
    outputs: tuple[str, ...] | None = None
    chunk_tokens: Annotated[
        int | None,
        flag("tokens of a chunk [default: the model's input, at most 512]"),
    ] = None
    chunk_overlap: Annotated[
        int | None,
        flag("tokens that two chunks may share [default: an eighth of a chunk]"),
    ] = None
    no_chunking: Annotated[bool, flag("one chunk a document; the model cuts longer texts")] = False
    headings: Annotated[
        bool,
        flag(
            "dense vectors of chunks also read the headings above, and the header of a table; "
            "takes a second pass"
        ),
    ] = False
    source_name: Annotated[
        str | None,
        flag("SOURCE's name in ids and payloads [default: its file name]", metavar="NAME"),
    ] = None
    include: Annotated[
        str | None,
        flag("comma-separated patterns of the files to read, such as *.md,docs/*", metavar="GLOBS"),
    ] = None
    exclude: Annotated[
        str | None, flag("patterns of files and folders to leave out", metavar="GLOBS")
    ] = None
    quarantine: Annotated[
        str | None,
        flag("file of rejected documents [default: NAME.quarantine.jsonl]", metavar="FILE"),
    ] = None
    delete_missing: Annotated[
        bool, flag("delete documents that have left SOURCE since an earlier ingest")
    ] = False
    dry_run: Annotated[bool, flag("print what would be stored and deleted, and change nothing")] = (
        False
    )
    reread: Annotated[bool, flag("also read files whose size and times have not changed")] = False
    engine: Annotated[
        Literal["local", "ray"], flag("where to embed: here, or in a Ray cluster")
    ] = "local"
    ray_workers: Annotated[
        int | None, flag("workers, a processor each [default: as many as the cluster has]")
    ] = None
    ray_address: Annotated[
        str | None,
        flag(
            "Ray cluster [default: RAY_ADDRESS, else a new one on this machine]", metavar="ADDRESS"
        ),
    ] = None
    wait_indexed: Annotated[bool, flag("do not wait until a server has indexed the points")] = True
    quiet: Annotated[bool, flag("show no progress")] = False
    plan: CollectionPlan = CollectionPlan()


class IngestKeywords(TypedDict, total=False):
    """The fields of `IngestOptions` and of a new collection that a library's caller gives, for type
    checkers."""

    text_field: str | None
    id_field: str | None
    max_record_bytes: int
    max_file_bytes: int
    max_document_characters: int
    max_metadata_bytes: int
    max_id_characters: int
    url: str | None
    url_api_key: str | None
    outputs: tuple[str, ...] | None
    chunk_tokens: int | None
    chunk_overlap: int | None
    no_chunking: bool
    headings: bool
    source_name: str | None
    include: str | None
    exclude: str | None
    quarantine: str | None
    delete_missing: bool
    dry_run: bool
    reread: bool
    engine: Literal["local", "ray"]
    ray_workers: int | None
    ray_address: str | None
    wait_indexed: bool
    quiet: bool
    plan: CollectionPlan
    dense_dim: int | None
    multivector_dim: int | None
    multivector_tokens: int | None
    multivector_dtype: MultivectorDtype | None
    datatype: Datatype | None
    quantization: Quantization | None
    on_disk: bool
    on_disk_payload: bool
    shards: int | None
    replicas: int | None
    index: Sequence[str]


@dataclass
class IngestStats:
    """Counts of an ingest so far. `documents`, `chunks`, `tokens`: stored by this run. `unchanged`:
    stored before.

    `files`: files read. `documents_missing`: stored documents that have left the source and stay;
    `kept`: the reason why they stay despite `delete_missing`. `documents_deleted`: documents that
    this ingest deleted, or would delete.
    `of_earlier_reading`: the unchanged ones that an earlier version of this reader read.
    `documents_unclear`: stored before, but not found in files that could not be read completely.
    `points`: in the collection at the end. `stopped`: a signal stopped the ingest.
    """

    documents: int = 0
    unchanged: int = 0
    quarantined: int = 0
    chunks: int = 0
    tokens: int = 0
    points: int = 0
    documents_missing: int = 0
    documents_deleted: int = 0
    documents_unclear: int = 0
    stopped: bool = False
    of_earlier_reading: int = 0
    files: int = 0
    kept: str | None = None
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended_s or time.monotonic()) - self.began_s

    @property
    def documents_per_s(self) -> float:
        return self.documents / max(self.seconds, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def in_words(self) -> str:
        parts = [
            f"{self.documents:,} documents ({self.documents_per_s:,.1f}/s)",
            f"{self.chunks:,} chunks",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        for what in ("unchanged", "quarantined"):
            if count := getattr(self, what):
                parts.append(f"{count:,} {what}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of an ingest. `store`: its place. `quarantine`: the file's path, if it has
    entries. `report`: what was left out or noted, by reason."""

    collection: str
    store: str
    stats: IngestStats
    quarantine: str | None
    dry_run: bool = False
    report: Sequence[Reason] = ()

    @property
    def status(self) -> int:
        """The exit status: 0 if every readable document is stored, 130 if a signal stopped the
        ingest, else 1."""
        if self.stats.stopped:
            return INTERRUPTED
        nothing = not self.stats.documents and not self.stats.unchanged and self.stats.quarantined
        return 1 if nothing or self.stats.kept else 0

    def as_json(self) -> str:
        fields = asdict(self)
        counts = fields.pop("stats")
        for name in ("files", "kept", "began_s", "ended_s"):
            del counts[name]
        for name, digits in (("seconds", 3), ("documents_per_s", 2), ("tokens_per_s", 1)):
            counts[name] = round(getattr(self.stats, name), digits)
        return orjson.dumps(fields | counts).decode()

    def in_words(self) -> str:
        stats = self.stats
        lines = [
            f"{stats.documents:,} documents in {stats.chunks:,} chunks stored in "
            f"{stats.seconds:,.1f} s ({stats.documents_per_s:,.1f} documents/s, "
            f"{stats.tokens_per_s:,.0f} tokens/s), {stats.unchanged:,} unchanged"
        ]
        if self.dry_run:
            lines = [
                f"nothing was changed: {stats.documents:,} documents would be stored, "
                f"{stats.unchanged:,} are unchanged"
            ]
        if stats.quarantined:
            lines.append(f"{stats.quarantined:,} could not be taken: {self.quarantine} says why")
        lines.append(f"collection {self.collection}, {self.store}: {stats.points:,} points")
        if earlier := stats.of_earlier_reading:
            lines.append(
                f"{earlier:,} documents stay as an earlier version read them: --reread reads them "
                "anew, with --dry-run it only counts them"
            )
        if deleted := stats.documents_deleted:
            lines.append(
                f"{deleted:,} documents that left the source "
                f"{'would be' if self.dry_run else 'were'} deleted"
            )
        if missing := stats.documents_missing:
            why = stats.kept or "--delete-missing deletes them"
            lines.append(f"{missing:,} documents left the source and stay searchable: {why}")
        if unclear := stats.documents_unclear:
            lines.append(
                f"{unclear:,} documents may also have left the source: their files could not be "
                "read completely, so they stay"
            )
        if stats.stopped:
            lines.append("stopped before the end: run the same command again to continue")
        lines += [
            f"{entry.count:>9,} {entry.what}: {entry.reason} ({entry.example})"
            for entry in self.report
        ]
        return "\n".join(lines)
