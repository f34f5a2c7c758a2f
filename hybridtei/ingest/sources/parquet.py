"""Parquet, a row a document; a small file may stand for gigabytes, so nothing is unfolded before its size is known.

Strings stay references into their column's dictionary until a row was measured. The footer tells how large a column's pages
and how long its lists can be, and a row group that would be large without being large in the file is not opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError
from hybridtei.ingest.documents import Rejected
from hybridtei.ingest.sources.limits import ReadOptions
from hybridtei.ingest.sources.records import Unfit
from hybridtei.ingest.sources.tables import Found, Progress, document_of, rejected

ROWS = 64  # read at a time
MAX_COLUMN_BYTES = 64_000_000  # of a row group's column, if it is more than so many times what it is in the file:
MAX_EXPANSION = 100
WIDTHS: Mapping[str, int] = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 16}


def read_parquet(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """A row a document. Raises LoadError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise LoadError("parquet files need pyarrow: pip install 'hybridtei[qdrant]'") from error
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
                        yield _from_row(batch, row, number, source, options), size * number // total
    except (pyarrow.ArrowException, OSError, Unfit) as error:
        yield Rejected(source, f"after row {number}", f"not readable as parquet: {error}"), size


def _check_group(file: Any, group: int, options: ReadOptions) -> None:
    """Raises Unfit for a row group that would unfold to far more than it is."""
    found = file.metadata.row_group(group)
    for place in range(found.num_columns):
        column, declared = found.column(place), file.schema.column(place)
        width = WIDTHS.get(column.physical_type, declared.length)
        if width > options.max_record_bytes:
            raise Unfit(f"`{column.path_in_schema}`: a cell has {width} bytes, allowed are {options.max_record_bytes}")
        unfolded = column.total_uncompressed_size + (column.num_values * width if declared.max_repetition_level else 0)
        if unfolded > max(MAX_COLUMN_BYTES, MAX_EXPANSION * column.total_compressed_size):
            raise Unfit(
                f"row group {group}, `{column.path_in_schema}`: {column.total_compressed_size} bytes would become {unfolded}, "
                f"allowed are {MAX_COLUMN_BYTES}, or {MAX_EXPANSION} times as many"
            )


def _from_row(batch: Any, row: int, number: int, source: str, options: ReadOptions) -> Found:
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
        return rejected(source, location, error, str(record))


def _size(cells: Any) -> int:
    """Bytes that cells would take if nothing were shared among them."""
    from pyarrow import compute, types

    kind = cells.type
    if types.is_dictionary(kind):
        entries = cells.indices.drop_null().value_counts()
        lengths = compute.binary_length(cells.dictionary.take(entries.field("values")))
        return int(compute.sum(compute.multiply(compute.cast(lengths, "int64"), entries.field("counts"))).as_py() or 0)
    if types.is_map(kind):
        return 0 if cells.null_count else _size(cells.keys.slice(*_span(cells))) + _size(cells.items.slice(*_span(cells)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _size(cells.flatten())
    if types.is_struct(kind):
        return sum(_size(field) for field in cells.flatten())
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return int(compute.sum(compute.cast(compute.binary_length(cells), "int64")).as_py() or 0)
    return int(cells.nbytes)


def _span(cells: Any) -> tuple[int, int]:
    """Where the entries of a map's cells lie, and how many they are."""
    offsets = cells.offsets
    return offsets[0].as_py(), offsets[-1].as_py() - offsets[0].as_py()
