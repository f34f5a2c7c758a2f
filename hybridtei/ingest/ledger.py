"""The files of an ingest beside the collection: a ledger of stored documents, a quarantine of rejected ones.

The ledger is a file of JSON lines that only grows; the last line about a document wins. Lines are written after the store has
answered, and are on the disk before the next batch is sent: a document may be stored and not noted, which costs a repetition of
the same ids, and never the other way about. A last line that a kill tore in two is cut off.

    {"d": key, "h": digest, "n": 3}    a document is stored, in chunks 0, 1 and 2
    {"d": key, "n": 0}                 it is not, any more; with "w": true, its source no longer holds it either
    {"c": mark, "n": 0}                the entries are all of the collection that names this mark (`ingest.identity`)
    {"f": label, "s": size, "m": modified_ns, "h": digest, "n": documents}    every document of a file is

The quarantine is written anew by each ingest:

    {"source": "data/rows.csv", "location": "line 7", "reason": "the row has 3 cells, the header 4", "excerpt": "…"}
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hybridtei.errors import InvalidInput
from hybridtei.ingest.chunking import Rejection
from hybridtei.ingest.files import SourceFile
from hybridtei.ingest.records import MAX_DOCUMENT_CHARACTERS


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """The version of a document that is stored."""

    digest: bytes
    chunks: int


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file whose documents are all stored, none quarantined."""

    size: int
    modified_ns: int
    digest: str
    documents: int


class Ledger:
    """A ledger, locked by one process. Raises InvalidInput if another process has locked it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.mark: str | None = None
        self._documents: dict[str, StoredDocument] = {}
        self._files: dict[str, FinishedFile] = {}
        self._file = path.open("a+b")
        try:
            _lock(self._file.fileno())
        except OSError as error:
            self._file.close()
            raise InvalidInput(f"{path}: another ingest into this collection is running") from error
        self._read()

    def __len__(self) -> int:
        """The number of stored documents."""
        return len(self._documents)

    @property
    def chunks(self) -> int:
        """The number of points of all stored documents."""
        return sum(stored.chunks for stored in self._documents.values())

    def items(self) -> Iterator[tuple[str, int]]:
        """(key, chunks) of every document."""
        return ((key, stored.chunks) for key, stored in self._documents.items())

    def stored_keys(self) -> Collection[str]:
        """The keys of all stored documents."""
        return self._documents.keys()

    def get(self, key: str) -> StoredDocument | None:
        """The stored version of a document, or None."""
        return self._documents.get(key)

    def finished(self, file: SourceFile, settings: bytes) -> FinishedFile | None:
        """The file's entry, if it is unchanged and was read with the same settings."""
        entry = self._files.get(file.label)
        current = (file.size, file.modified_ns, settings.hex())
        return entry if entry is not None and (entry.size, entry.modified_ns, entry.digest) == current else None

    def add(self, documents: Sequence[tuple[str, bytes, int]]) -> None:
        """Note (key, digest, chunks) of stored documents; on the disk when this returns."""
        self._write([{"d": key, "h": digest.hex(), "n": chunks} for key, digest, chunks in documents])

    def remove(self, keys: Sequence[str], *, files_are_whole: bool = False) -> None:
        """Note that these are not stored. `files_are_whole`: no file of the source holds them either."""
        self._write([{"d": key, "n": 0, **({"w": True} if files_are_whole else {})} for key in keys])

    def finish(self, files: Sequence[tuple[SourceFile, int]], settings: bytes) -> None:
        """Note (file, documents) of files whose documents are all stored, none in quarantine."""
        self._write(
            [
                {"f": file.label, "s": file.size, "m": file.modified_ns, "h": settings.hex(), "n": documents}
                for file, documents in files
            ]
        )

    def set_mark(self, mark: str | None) -> None:
        """Note which mark of a collection says that it is this ledger's; on the disk when this returns."""
        self._write([{"c": mark, "n": 0}])

    def move(self, path: Path) -> None:
        """Rename the file, which stays locked."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = self.path.rename(path)

    def clear(self) -> None:
        """Delete all entries and the mark, for a new collection."""
        self._file.truncate(0)
        self.mark = None
        self._documents.clear()
        self._files.clear()

    def close(self) -> None:
        """Unlock and close the file."""
        self._file.close()

    def _write(self, entries: Sequence[dict[str, Any]]) -> None:
        if not entries:
            return
        self._file.write(b"".join(orjson.dumps(entry) + b"\n" for entry in entries))
        self._file.flush()
        os.fsync(self._file.fileno())
        for entry in entries:
            self._apply(entry)

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                self._apply(orjson.loads(line))
            except (ValueError, KeyError, TypeError):
                break  # what follows a broken line is not to be trusted either
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _apply(self, entry: dict[str, Any]) -> None:
        if not 0 <= int(entry["n"]) <= MAX_DOCUMENT_CHARACTERS and "d" in entry:
            raise ValueError(f"{entry['n']} chunks")
        if "c" in entry:
            self.mark = entry["c"]
        elif "f" in entry:
            self._files[entry["f"]] = FinishedFile(int(entry["s"]), int(entry["m"]), str(entry["h"]), int(entry["n"]))
        elif entry["n"]:
            self._documents[entry["d"]] = StoredDocument(bytes.fromhex(entry["h"]), int(entry["n"]))
        else:
            self._documents.pop(entry["d"], None)
            if not entry.get("w"):
                self._files.clear()  # one of them is not complete any more, and which is not worth knowing


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


MAX_PER_SOURCE = 10_000  # of a file with a misnamed column, every row would be in it
MAX_FIRST_BYTES = 100_000


class Quarantine:
    """The file of rejections, created at the first. Raises InvalidInput where the path is a file of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counts: Counter[str] = Counter()
        if path.exists() and not _is_quarantine(path):
            raise InvalidInput(f"{path}: holds something else than what an earlier ingest could not take; name another file")
        path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._counts.total()

    def of(self, source: str) -> int:
        """The number of rejections of a file."""
        return self._counts[source]

    def add(self, rejected: Rejection) -> None:
        """Count a rejection; of one file, only the first 10,000 are written."""
        self._counts[rejected.source] += 1
        count = self._counts[rejected.source]
        if count > MAX_PER_SOURCE + 1:
            return
        entry = {
            "source": rejected.source,
            "location": rejected.location,
            "reason": rejected.reason if count <= MAX_PER_SOURCE else f"and more: only {MAX_PER_SOURCE} of a file are listed",
            "excerpt": rejected.excerpt,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(orjson.dumps(entry) + b"\n")


def _is_quarantine(path: Path) -> bool:
    """Whether the first line, which may be incomplete, is a rejection's."""
    with path.open("rb") as file:
        first = file.readline(MAX_FIRST_BYTES)
    return not first or (first.startswith(b'{"source":') and b'"location":' in first)
