"""What SOURCE names: a file, a BEIR folder, or a folder of any of them; in the same order every time.

A file's label is the folder's name and the path below it, so that a collection stays the same when the folder moves. Hidden
files are left out, and so are links that lead out of the folder; folders behind links are not entered at all. What an ingest
itself writes is no source either: collections of the embedded engine, and files of what could not be taken.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtei.errors import InvalidInput
from hybridtei.ingest.chunking import Document, Rejected
from hybridtei.ingest.sources.records import ReadOptions
from hybridtei.ingest.sources.tables import Progress, read_csv, read_jsonl, read_parquet
from hybridtei.ingest.sources.whole_files import PARSERS, read_whole

TABLES = {
    **dict.fromkeys((".jsonl", ".ndjson"), read_jsonl),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    ".parquet": read_parquet,
}
KINDS = (*TABLES, *PARSERS)
QUARANTINE = ".quarantine.jsonl"  # what the name of such a file ends in, if the user gives none
COLLECTION = {"layout.json", "shard"}  # what a collection's folder holds
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})  # of a file that vanished, or of a link to none
BEIR_CORPUS, BEIR_QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read: its label in ids and payloads, its size, and when it was changed. `unreadable`: why it cannot be read; it
    may be a folder then."""

    path: Path
    label: str
    size: int
    modified_ns: int
    unreadable: str | None = None


def source_files(source: Path, name: str | None = None, quarantine: Path | None = None) -> Iterator[SourceFile]:
    """Every file of `source`, whether there is a reader for it or not. `name` stands for the source's own in labels;
    `quarantine` is left out.

    Raises InvalidInput if it is not there, or is a file of another kind, and OSError if it is a folder that cannot be read.
    """
    root, label = source.resolve(), label_of(source, name)
    if root.is_dir():
        entries = sorted(root.iterdir())
        yield from _below(entries, root, label, quarantine.resolve() if quarantine is not None else None)
        return
    if not root.exists():
        raise InvalidInput(f"{source}: no such file or folder")
    if root.suffix.lower() not in KINDS:
        raise InvalidInput(f"{source}: should be a folder, or end in {', '.join(KINDS)}")
    found = root.stat()
    yield SourceFile(root, label, found.st_size, found.st_mtime_ns)


def label_of(source: Path, name: str | None = None) -> str:
    """What the labels of all its files begin with; a single file's label."""
    return name or _printable(source.resolve().name) or "root"


def documents_of(file: SourceFile, options: ReadOptions) -> Iterator[Progress]:
    """What a file holds, and after each document how many bytes of the file are behind it. Raises LoadError without the library
    that its kind needs."""
    suffix = file.path.suffix.lower()
    try:
        if file.unreadable is not None:
            yield Rejected(file.label, "file", f"cannot be read: {file.unreadable}"), file.size
        elif suffix in TABLES:
            yield from TABLES[suffix](file.path, file.label, options)
        elif suffix in PARSERS:
            yield read_whole(file.path, file.label, options), file.size
        else:
            kind = f"files ending in {suffix!r}" if suffix else "files without an ending"
            yield Rejected(file.label, "file", f"no reader for {kind}"), file.size
    except OSError as error:
        yield Rejected(file.label, "file", f"cannot be read: {error.strerror or error}"), file.size


def _below(entries: Sequence[Path], root: Path, label: str, quarantine: Path | None) -> Iterator[SourceFile]:
    names = {entry.name for entry in entries}
    if names >= COLLECTION:
        return
    if {BEIR_CORPUS, BEIR_QUERIES} <= names:
        entries = [entry for entry in entries if entry.name == BEIR_CORPUS]
    for entry in entries:
        here = f"{label}/{_printable(entry.name)}"
        if entry.name.startswith(".") or entry.name.endswith(QUARANTINE) or entry == quarantine:
            continue
        try:
            found = entry.stat()
            if stat.S_ISDIR(found.st_mode):
                below = [] if entry.is_symlink() else sorted(entry.iterdir())
            elif not stat.S_ISREG(found.st_mode):  # a pipe would be waited for until for ever
                continue
        except OSError as error:
            if error.errno not in GONE:
                yield SourceFile(entry, here, 0, 0, error.strerror or str(error))
            continue
        if stat.S_ISDIR(found.st_mode):
            yield from _below(below, root, here, quarantine)
        elif _is_within(entry, root):
            yield SourceFile(entry, here, found.st_size, found.st_mtime_ns)


def _is_within(entry: Path, root: Path) -> bool:
    """Of links, where they lead."""
    return Path(os.path.realpath(entry)).is_relative_to(root)


def _printable(name: str) -> str:
    """A file system's name may be no text at all."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


__all__ = ["Document", "SourceFile", "documents_of", "label_of", "source_files"]
