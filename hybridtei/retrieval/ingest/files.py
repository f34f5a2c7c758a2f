"""The files of SOURCE, and their documents: plain text, Markdown, HTML and PDF files are one
document each.

SOURCE is a file, a BEIR folder, or a folder of any of these. The order of files is always the same.
A file's label is the source's name in the collection plus the path below the source. Skipped are
hidden files, links that lead out of the folder, all folders behind links, and an ingest's own
files: collections of the embedded engine, and files of rejected records.

A reader yields documents one by one, with one record or one small file in memory. For a part that
is not a document it yields a `Rejection` with place and reason, and continues. The quarantine is
the file of rejections, JSON lines of `source`, `location`, `reason` and `excerpt` that each ingest
writes again.
"""

from __future__ import annotations

import atexit
import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType

import orjson

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.reader import Reader, excerpt
from hybridtei.retrieval.ingest.report import Report
from hybridtei.retrieval.ingest.tables import Progress

# Folders that programs fill: not what a person wrote.
PROGRAMS_FOLDERS = frozenset(
    ("node_modules", "__pycache__", "venv", "target", "site-packages", "bower_components")
)
# The default file's ending
QUARANTINE = ".quarantine.jsonl"
# Contents of a collection's folder
COLLECTION = {"layout.json", "shard"}
# The stamp of a file that vanished, or of a broken link
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
BEIR_CORPUS, BEIR_QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read. `label`: in ids and payloads. `size`: in bytes. `times`: of its last changes,
    in ns. `unreadable`: the reason why the file or folder cannot be read. `left_out`: why it is not
    read although it could be."""

    path: Path
    label: str
    size: int = 0
    times: tuple[int, ...] = ()
    unreadable: str | None = None
    left_out: str | None = None

    @property
    def stamp(self) -> list[int]:
        """Size and times, which a document that is the whole file keeps."""
        return [self.size, *self.times]


def source_files(
    source: Path,
    label: str | None = None,
    quarantine: Path | None = None,
    known: Mapping[Path, str] = MappingProxyType({}),
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Iterator[SourceFile]:
    """Every file of `source`, even without a reader for it, except `quarantine`. `label`: the
    source's. `known`: labels of files and folders that are sources of their own. `include`,
    `exclude`: patterns of names, or of paths below the source.

    Raises InvalidInput if the source does not exist, and OSError for an unreadable folder.
    """
    root = source.resolve()
    label = label or printable(root.name) or "root"
    if root.is_dir():
        quarantine = quarantine and quarantine.resolve()
        for file in _below(sorted(root.iterdir()), root, label, quarantine, known):
            yield _selected(file, root, include, exclude)
        return
    check_source(source)
    yield _file(root, label, root.stat())


def _selected(
    file: SourceFile, root: Path, include: Sequence[str], exclude: Sequence[str]
) -> SourceFile:
    """The file, left out if a pattern says so."""
    path = file.path.relative_to(root)
    # A pattern may name the file, a folder above it, or a path of either
    names = [*path.parts, *map(str, path.parents), str(path)]

    def matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns for name in names)

    if file.left_out is None and matches(exclude, names):
        return replace(file, left_out="excluded by --exclude")
    if file.left_out is None and include and not matches(include, names):
        return replace(file, left_out="not named by --include")
    return file


def check_source(source: Path) -> None:
    """Raises InvalidInput if the path does not exist."""
    if not source.resolve().exists():
        raise InvalidInput(f"{source}: no such file or folder")


def _file(path: Path, label: str, status: os.stat_result) -> SourceFile:
    return SourceFile(path, label, status.st_size, (status.st_mtime_ns, status.st_ctime_ns))


# For callers without a reader of their own
_shared = Reader()
atexit.register(_shared.end)


def documents_of(
    file: SourceFile, options: ReadOptions, reader: Reader = _shared
) -> Iterator[Progress]:
    """Yield (document or rejection, bytes of the file read so far). `reader`: the process that
    reads it. A file that it cannot read is a rejection."""
    if file.unreadable is not None:
        yield Rejection(file.label, "file", f"cannot be read: {file.unreadable}"), file.size
    else:
        yield from reader.read(file.path, file.label, file.size, options)


def _below(
    entries: Sequence[Path],
    root: Path,
    label: str,
    quarantine: Path | None,
    known: Mapping[Path, str],
) -> Iterator[SourceFile]:
    names = {entry.name for entry in entries}
    if names >= COLLECTION:
        return
    is_beir = {BEIR_CORPUS, BEIR_QUERIES} <= names
    for entry in entries:
        entry_label = known.get(entry) or f"{label}/{printable(entry.name)}"
        if entry.name.endswith(QUARANTINE) or entry == quarantine:
            continue
        if is_beir and entry.name in (BEIR_QUERIES, "qrels", "qrels.tsv"):
            yield SourceFile(
                entry, entry_label, left_out="queries and judgements beside a BEIR corpus"
            )
            continue
        if entry.name.startswith("."):
            yield SourceFile(entry, entry_label, left_out="hidden files and folders")
            continue
        below: list[Path] = []
        try:
            status = entry.stat()
            left_out = _left_out(entry, status.st_mode, root)
            if left_out is None and stat.S_ISDIR(status.st_mode):
                below = sorted(entry.iterdir())
        except OSError as error:
            if error.errno not in GONE:
                yield SourceFile(entry, entry_label, unreadable=error.strerror or str(error))
            elif entry.is_symlink():
                yield SourceFile(entry, entry_label, left_out="links that lead nowhere")
            continue
        if left_out is not None:
            yield SourceFile(entry, entry_label, left_out=left_out)
        elif stat.S_ISDIR(status.st_mode):
            yield from _below(below, root, entry_label, quarantine, known)
        else:
            yield _file(entry, entry_label, status)


def _left_out(entry: Path, mode: int, root: Path) -> str | None:
    """Why a file or folder is not read, if it is not."""
    if stat.S_ISDIR(mode):
        if entry.is_symlink():
            return "links to folders"
        return f"folders named {entry.name}" if entry.name in PROGRAMS_FOLDERS else None
    if not stat.S_ISREG(mode):
        # Reading a pipe could block for ever
        return "pipes, sockets and devices"
    # A link whose target lies in the source is a file of it
    if Path(os.path.realpath(entry)).is_relative_to(root):
        return None
    return "links to files outside of the folder"


def printable(name: str) -> str:
    """The name as valid Unicode, since a file system allows other names."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


# Of a file; with a misnamed column every row would be rejected
MAX_PER_SOURCE = 10_000
MAX_FIRST_BYTES = 100_000


class Quarantine:
    """The file of rejections, created at the first one. Raises InvalidInput if the path is another
    kind of file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = Report()
        self._counts: Counter[str] = Counter()
        if path.exists():
            with path.open("rb") as file:
                # A killed ingest may have left this line incomplete
                first = file.readline(MAX_FIRST_BYTES)
            if first and not (first.startswith(b'{"source":') and b'"location":' in first):
                raise InvalidInput(
                    f"{path}: is not a quarantine file of an earlier ingest; name another file"
                )
        path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, rejected: Rejection) -> None:
        """Count a rejection. Only the first 10,000 of a file are written."""
        if rejected.is_left_out:
            self.report.add("left out", rejected.reason, rejected.source)
            return
        what = "files" if rejected.location == "file" else "rows"
        self.report.add(what, rejected.reason, f"{rejected.source}, {rejected.location}")
        self._counts[rejected.source] += 1
        count = self._counts[rejected.source]
        reason = rejected.reason
        if count > MAX_PER_SOURCE + 1:
            return
        if count > MAX_PER_SOURCE:
            reason = f"and more: only {MAX_PER_SOURCE} of a file are listed"
        entry = {
            "source": rejected.source,
            "location": rejected.location,
            "reason": reason,
            "excerpt": excerpt(rejected.written),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(orjson.dumps(entry) + b"\n")
