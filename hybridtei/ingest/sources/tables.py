"""Files of many records: jsonl (BEIR's corpus too), csv and tsv; each record comes with the bytes behind it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from hybridtei.ingest.documents import Document, Rejected
from hybridtei.ingest.sources.limits import ReadOptions, excerpt
from hybridtei.ingest.sources.lines import Line, bounded_lines, decoded
from hybridtei.ingest.sources.records import Unfit, id_of, text_and_rest

Found = Document | Rejected
Progress = tuple[Found, int]  # and how many bytes of the file are behind it


def read_jsonl(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """An object or a string a line; lines without an id are called after their number. Blank lines count as nothing."""
    with path.open("rb") as file:
        for line in bounded_lines(file, options.max_record_bytes):
            if line.is_whole and not line.data.strip():
                continue
            yield _from_line(line, source, options), line.offset + line.length


def _from_line(line: Line, source: str, options: ReadOptions) -> Found:
    location = f"line {line.number}"
    try:
        if not line.is_whole:
            raise Unfit(f"the line has {line.length} bytes, allowed are {options.max_record_bytes}")
        decoded(line)
        return document_of(_parsed(line.data, options), source, location, f"line-{line.number}", options)
    except ValueError as error:
        return rejected(source, location, error, line.data)


def _parsed(data: bytes, options: ReadOptions) -> Mapping[str, Any]:
    try:
        value = orjson.loads(data)  # refuses NaN and lone surrogates
    except ValueError as error:
        raise Unfit(f"not JSON: {error}") from None
    if isinstance(value, str):
        return {options.text_field or "text": value}
    if not isinstance(value, dict):
        raise Unfit("the line is neither an object nor a string")
    return value


def document_of(record: Mapping[str, Any], source: str, location: str, fallback: str, options: ReadOptions) -> Document:
    """Raises Unfit."""
    try:
        document_id, text, title, metadata = text_and_rest(record, options, fallback)
    except Unfit as error:
        error.document_id = id_of(record, options, fallback)
        raise
    return Document(source, document_id, text, title, metadata, location)


def rejected(source: str, location: str, error: ValueError, written: bytes | str) -> Rejected:
    """`written`: the record as the source has it."""
    return Rejected(source, location, str(error), excerpt(written), error.document_id if isinstance(error, Unfit) else None)


def read_csv(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """Rows under a header; commas in .csv, tabs in .tsv. Cells are strings and stay so."""
    csv.field_size_limit(options.max_record_bytes)  # of the process: the module has no other
    with path.open("rb") as file:
        lines = _CsvLines(file, options.max_record_bytes)
        rows = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            began, lines.row_bytes = lines.number + 1, 0
            try:
                row = next(rows)
                lines.raise_if_broken()
            except StopIteration:
                return
            except (csv.Error, ValueError) as error:
                lines.broken = None
                yield Rejected(source, f"line {began}", str(error), excerpt(lines.last)), lines.offset
                if header is None:
                    return
                continue
            if header is None:
                header = row
            elif row:
                yield _from_row(header, row, source, f"line {began}", options), lines.offset


def _from_row(header: list[str], row: list[str], source: str, location: str, options: ReadOptions) -> Found:
    try:
        if len(row) != len(header):
            raise Unfit(f"the row has {len(row)} cells, the header {len(header)}")
        return document_of(dict(zip(header, row, strict=True)), source, location, location.replace(" ", "-"), options)
    except Unfit as error:
        return rejected(source, location, error, ",".join(row))


class _CsvLines:
    """Lines of text for csv.reader. One that cannot be taken is emptied or mended, and `raise_if_broken` tells of it."""

    def __init__(self, file: Any, max_bytes: int) -> None:
        self._lines = bounded_lines(file, max_bytes)
        self._max_bytes = max_bytes
        self.number = self.offset = self.row_bytes = 0
        self.last = b""
        self.broken: str | None = None

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number, self.offset, self.last = line.number, line.offset + line.length, line.data
        self.row_bytes += line.length
        if line.is_whole and self.row_bytes > self._max_bytes:  # the reader begins anew after an exception
            raise ValueError(f"the row has more than {self._max_bytes} bytes")
        if not line.is_whole:
            self.broken = f"the line has {line.length} bytes, allowed are {self._max_bytes}"
            return "\n"
        try:
            text = decoded(line)
        except ValueError as error:
            self.broken = str(error)
            text = line.data.decode(errors="replace")  # its quotes still count
        return text + "\n"

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise ValueError(self.broken)
