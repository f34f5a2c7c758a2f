"""Files of many documents: Parquet and CSV, a row a document, and JSON Lines, a line a document.

A small Parquet file may unfold to gigabytes, so its sizes are checked first. Strings stay references into their column's
dictionary until their row is measured. The footer has the sizes of a column's pages and bounds of its lists; a row group that
would be large without being large in the file is not opened.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import orjson

from hybridtei.retrieval.ingest.chunking import Document, Rejection
from hybridtei.retrieval.ingest.records import (
    Line,
    ReadOptions,
    Unfit,
    bounded_lines,
    decode_line,
    excerpt,
    id_of,
    text_and_rest,
)
from hybridtei.system.machine import require_extra

ROWS = 64  # read at a time
MAX_COLUMN_BYTES = 64_000_000  # of a row group's column, if it is more than so many times what it is in the file:
MAX_EXPANSION = 100
WIDTHS: Mapping[str, int] = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 16}


def read_parquet(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """A row a document. Raises LoadError without pyarrow."""
    require_extra("parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            strings = [column.path for column in file.schema if column.physical_type == "BYTE_ARRAY"]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=strings, pre_buffer=False) as file:
            total = max(1, file.metadata.num_rows)
            for group in range(file.num_row_groups):
                _check_group(file, group, options)
                for batch in file.iter_batches(batch_size=ROWS, row_groups=[group]):
                    for row in range(batch.num_rows):
                        number += 1
                        yield _from_batch_row(batch, row, number, source, options), size * number // total
    except (pyarrow.ArrowException, OSError, Unfit) as error:
        yield Rejection(source, f"after row {number}", f"not readable as parquet: {error}"), size


def _check_group(file: Any, group: int, options: ReadOptions) -> None:
    """Raises Unfit for a row group that would unfold to far more bytes than it has."""
    metadata = file.metadata.row_group(group)
    for place in range(metadata.num_columns):
        column, declared = metadata.column(place), file.schema.column(place)
        width = WIDTHS.get(column.physical_type, declared.length)
        if width > options.max_record_bytes:
            raise Unfit(f"`{column.path_in_schema}`: a cell has {width} bytes, allowed are {options.max_record_bytes}")
        unfolded = column.total_uncompressed_size + (column.num_values * width if declared.max_repetition_level else 0)
        if unfolded > max(MAX_COLUMN_BYTES, MAX_EXPANSION * column.total_compressed_size):
            raise Unfit(
                f"row group {group}, `{column.path_in_schema}`: {column.total_compressed_size} bytes would become {unfolded}, "
                f"allowed are {MAX_COLUMN_BYTES}, or {MAX_EXPANSION} times as many"
            )


def _from_batch_row(batch: Any, row: int, number: int, source: str, options: ReadOptions) -> Found:
    location = f"row {number}"
    record: dict[str, Any] = {}
    try:
        size = 0
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            cell = column.slice(row, 1)
            size += _size(cell)
            if size > options.max_record_bytes:
                raise Unfit(f"the row has {size} bytes up to `{name}`, allowed are {options.max_record_bytes}")
            try:
                record[name] = cell[0].as_py()
            except UnicodeDecodeError as error:
                raise Unfit(f"`{name}` is not UTF-8: byte {error.start} of the cell") from None
        present = {name: value for name, value in record.items() if value is not None or name == (options.text_field or "text")}
        return document_of(present, source, location, f"row-{number}", options)
    except ValueError as error:
        return rejection(source, location, error, str(record))


def _size(cells: Any) -> int:
    """Bytes of cells if they shared nothing."""
    from pyarrow import compute, types

    kind = cells.type
    if types.is_dictionary(kind):
        return _dictionary_size(cells.indices.drop_null().to_numpy(zero_copy_only=False), cells.dictionary)
    if types.is_map(kind):
        return 0 if cells.null_count else _size(cells.keys.slice(*_span(cells))) + _size(cells.items.slice(*_span(cells)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _size(cells.flatten())
    if types.is_struct(kind):
        return sum(_size(field) for field in cells.flatten())
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return int(compute.sum(compute.cast(compute.binary_length(cells), "int64")).as_py() or 0)
    return int(cells.nbytes)


def _dictionary_size(places: IntArray, texts: Any) -> int:
    """Bytes of dictionary texts, from their offsets alone: taking the texts would copy them."""
    if not len(places):
        return 0
    kind = numpy.dtype("int64" if "large" in str(texts.type) else "int32")
    offsets: Any = numpy.frombuffer(texts.buffers()[1], kind)[texts.offset :]
    return int(numpy.sum(offsets[places + 1] - offsets[places], dtype=numpy.int64))


def _span(cells: Any) -> tuple[int, int]:
    """(first entry, number of entries) of a map's cells."""
    offsets = cells.offsets
    return offsets[0].as_py(), offsets[-1].as_py() - offsets[0].as_py()


IntArray = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
Found = Document | Rejection
Progress = tuple[Found, int]  # and how many bytes of the file are behind it


def read_jsonl(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """An object or a string a line; a line without an id has its number as id. Blank lines are skipped."""
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
        decode_line(line)
        return document_of(_parsed(line.data, options), source, location, f"line-{line.number}", options)
    except ValueError as error:
        return rejection(source, location, error, line.data)


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
    """The document of a record. Raises Unfit, with the record's id where it has one."""
    try:
        document_id, text, title, metadata = text_and_rest(record, options, fallback)
    except Unfit as error:
        error.document_id = id_of(record, options, fallback)
        raise
    return Document(source, document_id, text, title, metadata, location)


def rejection(source: str, location: str, error: ValueError, written: bytes | str) -> Rejection:
    """The rejection of a record; `written`: its bytes or text in the source."""
    return Rejection(source, location, str(error), excerpt(written), error.document_id if isinstance(error, Unfit) else None)


def read_csv(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """Rows under a header; commas in .csv, tabs in .tsv. All cells are strings."""
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
                yield Rejection(source, f"line {began}", str(error), excerpt(lines.last)), lines.offset
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
        return rejection(source, location, error, ",".join(row))


class _CsvLines:
    """Lines of text for csv.reader. A broken line is replaced, and `raise_if_broken` raises its error."""

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
            text = decode_line(line)
        except ValueError as error:
            self.broken = str(error)
            text = line.data.decode(errors="replace")  # its quotes still count
        return text + "\n"

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise ValueError(self.broken)
