"""What SOURCE names: a file, a BEIR folder, or a folder of any of them; in the same order every time.

A file's label is the folder's name and the path below it, so that a collection stays the same when the folder moves. Hidden
files are left out, and so are links that lead out of the folder; folders behind links are not entered at all.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridtei.errors import InvalidInput
from hybridtei.qdrant.documents import Document, Rejected
from hybridtei.qdrant.sources.limits import ReadOptions
from hybridtei.qdrant.sources.tables import Progress, read_csv, read_jsonl, read_parquet
from hybridtei.qdrant.sources.whole_files import PARSERS, read_whole

TABLES = {
    **dict.fromkeys((".jsonl", ".ndjson"), read_jsonl),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    ".parquet": read_parquet,
}
KINDS = (*TABLES, *PARSERS)
BEIR_CORPUS, BEIR_QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read: its label in ids and payloads, its size, and when it was changed."""

    path: Path
    label: str
    size: int
    modified_ns: int


def source_files(source: Path, name: str | None = None) -> Iterator[SourceFile]:
    """Every file of `source`, whether there is a reader for it or not. `name` stands for the source's own in labels.

    Raises InvalidInput if it is not there, or is a file of another kind.
    """
    root, label = source.resolve(), label_of(source, name)
    if root.is_dir():
        yield from _below(root, root, label)
        return
    if not root.exists():
        raise InvalidInput(f"{source}: no such file or folder")
    if root.suffix.lower() not in KINDS:
        raise InvalidInput(f"{source}: should be a folder, or end in {', '.join(KINDS)}")
    yield _described(root, label)


def label_of(source: Path, name: str | None = None) -> str:
    """What the labels of all its files begin with; a single file's label."""
    return name or _printable(source.resolve().name) or "root"


def documents_of(file: SourceFile, options: ReadOptions) -> Iterator[Progress]:
    """What a file holds, and after each document how many bytes of the file are behind it. Raises LoadError without the library
    that its kind needs."""
    suffix = file.path.suffix.lower()
    try:
        if suffix in TABLES:
            yield from TABLES[suffix](file.path, file.label, options)
        elif suffix in PARSERS:
            yield read_whole(file.path, file.label, options), file.size
        else:
            kind = f"files ending in {suffix!r}" if suffix else "files without an ending"
            yield Rejected(file.label, "file", f"no reader for {kind}"), file.size
    except OSError as error:
        yield Rejected(file.label, "file", f"cannot be read: {error.strerror or error}"), file.size


def _below(folder: Path, root: Path, label: str) -> Iterator[SourceFile]:
    entries = sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)
    names = {entry.name for entry in entries}
    if {BEIR_CORPUS, BEIR_QUERIES} <= names:
        entries = [folder / BEIR_CORPUS]
    for entry in entries:
        here = f"{label}/{_printable(entry.name)}"
        if entry.is_symlink() and (entry.is_dir() or not entry.resolve().is_relative_to(root)):
            continue
        if entry.is_dir():
            yield from _below(entry, root, here)
        elif _is_regular(entry):
            yield _described(entry, here)


def _is_regular(path: Path) -> bool:
    """A pipe would be waited for until for ever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _described(path: Path, label: str) -> SourceFile:
    found = path.stat()
    return SourceFile(path, label, found.st_size, found.st_mtime_ns)


def _printable(name: str) -> str:
    """A file system's name may be no text at all."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


__all__ = ["Document", "SourceFile", "documents_of", "label_of", "source_files"]
