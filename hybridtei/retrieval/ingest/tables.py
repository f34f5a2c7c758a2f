"""Files of many documents: Parquet (a row each) and JSON Lines (a line each).

A line is read up to its allowed length. A small Parquet file can unfold to gigabytes: the reader's
process bounds these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from hybridtei.retrieval.ingest.document import Document, Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Unfit, as_utf8, normalised, notes_of
from hybridtei.system.machine import require_extra

Found = Document | Rejection
# And the bytes of the file read so far
Progress = tuple[Found, int]
ID_FIELDS, TITLE_FIELD = ("_id", "id"), "title"
WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,14})")
DECIMAL = re.compile(r"-?(?:0|[1-9]\d{0,9})\.\d{1,6}")


def document_of(
    read: Callable[[], Mapping[str, Any]],
    written: object,
    source: str,
    location: str,
    options: ReadOptions,
    *,
    notes: Sequence[str] = (),
    numbers: frozenset[str] = frozenset(),
) -> Found:
    """The document of the record from `read`, or a rejection. `written`: the record in the source.
    `notes`: of the file.
    `numbers`: fields whose strings become numbers, and are left out if empty."""
    try:
        document = _document(read(), source, location, options, notes)
        if not numbers:
            return document
        metadata = {
            name: value_of(cell) if name in numbers else cell
            for name, cell in document.metadata.items()
            if cell or name not in numbers
        }
        earlier = document.earlier or (document.title, document.text, document.metadata)
        return replace(document, metadata=metadata, earlier=earlier)
    except ValueError as error:
        document_id = getattr(error, "document_id", None)
        return Rejection(source, location, str(error), written, document_id)


def _document(
    record: Mapping[str, Any],
    source: str,
    location: str,
    options: ReadOptions,
    notes: Sequence[str],
) -> Document:
    """The document of a record. Without an id, its location is the id. Raises Unfit."""
    id_field, id_kind, document_id = _id(record, options, location.replace(" ", "-"))
    text_field = options.text_field or "text"
    try:
        text, title = _text(record, text_field, options)
        rest = {
            name: value
            for name, value in record.items()
            if name not in (text_field, TITLE_FIELD, id_field)
        }
        metadata, unfit = _storable(rest, options)
    except Unfit as error:
        error.document_id = document_id
        raise
    clean_text = normalised(text)
    clean_title = title and normalised(title)
    notes = (*notes, *notes_of(text), *unfit)
    # What the first reading stored, where it differs
    earlier = None
    if (clean_text, clean_title) != (text, title):
        earlier = (title, text, metadata)
    return Document(
        source,
        document_id,
        clean_text,
        clean_title,
        metadata,
        location,
        notes,
        earlier,
        id_kind=id_kind,
    )


def value_of(cell: Any) -> Any:
    """The number that a string writes in the usual way, or else the string."""
    if not isinstance(cell, str):
        return cell
    if WHOLE.fullmatch(cell):
        return int(cell)
    return float(cell) if DECIMAL.fullmatch(cell) else cell


def check_text_column(names: Sequence[str], options: ReadOptions) -> None:
    """Raises Unfit for a table without a column of text."""
    field = options.text_field or "text"
    if field not in names:
        columns = _names(dict.fromkeys(names))
        raise Unfit(f"has no column `{field}`; it has {columns}: name the text with --text-field")


def _id(
    record: Mapping[str, Any], options: ReadOptions, fallback: str
) -> tuple[str | None, str, str]:
    """(its field, its kind, the id). Raises Unfit."""
    names = (options.id_field,) if options.id_field else ID_FIELDS
    name = next((name for name in names if name in record), None)
    if name is None:
        if options.id_field:
            raise Unfit(
                f"has no `{options.id_field}`; it has {_names(record)}: name the id with --id-field"
            )
        return None, "place", fallback
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Unfit(f"`{name}` is {_kind(value)}, should be a string or a whole number")
    document_id = str(value)
    if not 1 <= len(document_id) <= options.max_id_characters:
        raise Unfit(
            f"`{name}` has {len(document_id)} characters, should have 1 to "
            f"{options.max_id_characters}"
        )
    kind = "text"
    if isinstance(value, int):
        kind = "number"
    return name, kind, document_id


def _text(record: Mapping[str, Any], field: str, options: ReadOptions) -> tuple[str, str | None]:
    """(text, title). Raises Unfit."""
    if field not in record:
        raise Unfit(f"has no `{field}`; it has {_names(record)}: name the text with --text-field")
    text, title = record[field], record.get(TITLE_FIELD)
    if not isinstance(text, str):
        raise Unfit(f"`{field}` is {_kind(text)}, should be a string")
    if title is not None and not isinstance(title, str):
        raise Unfit(f"`{TITLE_FIELD}` is {_kind(title)}, should be a string")
    if not text.strip() and not (title or "").strip():
        raise Unfit(f"`{field}` is empty")
    if len(text) > options.max_document_characters:
        raise Unfit(
            f"`{field}` has {len(text)} characters, allowed are {options.max_document_characters}"
        )
    return text, title or None


def _storable(rest: Mapping[str, Any], options: ReadOptions) -> tuple[dict[str, Any], list[str]]:
    """(the metadata without fields that cannot be stored; a note of these). Raises Unfit for
    metadata that are too long."""
    try:
        return metadata_of(rest, options), []
    except Unfit:
        fields: dict[str, Any] = {}
        unfit: list[str] = []
        for name, value in rest.items():
            try:
                metadata_of({name: value}, options)
                fields[name] = value
            except Unfit:
                unfit.append(name)
    note = f"fields that cannot be stored were left out: {', '.join(unfit[:20])}"
    return metadata_of(fields, options), [note] * bool(unfit)


def metadata_of(rest: Mapping[str, Any], options: ReadOptions) -> dict[str, Any]:
    """The metadata in JSON's types: dates as ISO 8601, other types as text. Raises Unfit."""
    for name, value in rest.items():
        _check_finite(value, name, 0)
    try:
        written = orjson.dumps(rest, default=_as_text, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unfit(f"metadata is not JSON: {error}") from None
    if len(written) > options.max_metadata_bytes:
        raise Unfit(f"metadata has {len(written)} bytes, allowed are {options.max_metadata_bytes}")
    plain: dict[str, Any] = orjson.loads(written)
    return plain


def _check_finite(value: Any, path: str, depth: int) -> None:
    """Raises Unfit for NaN and infinity, which JSON would turn into null."""
    if depth > 50:
        raise Unfit(f"`{path[:80]}…` is nested deeper than 50 levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfit(f"`{path}` is {value}, which cannot be stored as a number")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_finite(item, f"{path}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_finite(item, path, depth + 1)


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        raise TypeError("it holds bytes")
    return str(value)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _names(record: Mapping[str, Any]) -> str:
    if not record:
        return "no fields"
    names = [f"`{str(name)[:40]}`" for name in record]
    return ", ".join(names[:20]) + ("…" if len(names) > 20 else "")


# Bytes of a line that is too long: kept, and read at a time
KEPT_BYTES, SKIP_BYTES = 1000, 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A line. `data`: without the line end; only the beginning of a line that is too long.
    `offset`: of its first byte in the file. `length`: of the whole line in bytes."""

    number: int
    offset: int
    data: bytes
    length: int
    is_whole: bool = True

    def decoded(self) -> str:
        """The line's text, with U+FFFD for bytes that are not UTF-8."""
        return self.data.decode(errors="replace")


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """Every line, numbered from 1."""
    number, offset = 0, 0
    while head := file.readline(max_bytes + len(b"\r\n")):
        number += 1
        end = offset + len(head)
        # Skip the rest of a line that is too long; `last` is b"" at the end of the file
        last = head
        while not last.endswith(b"\n") and (last := file.readline(SKIP_BYTES)):
            end += len(last)
        data = head.removesuffix(b"\n").removesuffix(b"\r")
        if end == offset + len(head) and len(data) <= max_bytes:
            yield Line(number, offset, data, len(data))
        else:
            has_line_end = (last or head).endswith(b"\n")
            length = end - offset - has_line_end
            yield Line(number, offset, data[:KEPT_BYTES], length, is_whole=False)
        offset = end


def _parsed(data: bytes | str) -> Any:
    """A value of JSON, with the NaN and the large numbers that Python writes. Raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    # Half a character is no text
    json.dumps(value, ensure_ascii=False).encode()
    return value


def json_records(
    path: Path, options: ReadOptions
) -> Callable[[Path, str, ReadOptions], Iterator[Progress]] | None:
    """The reader of a JSON file of records with a text: of their lines, or of a list of them."""
    field = options.text_field or "text"
    with path.open("rb") as file:
        first = file.readline(options.max_record_bytes)
        try:
            value = _parsed(first)
            if isinstance(value, dict) and field in value:
                return read_jsonl
        except ValueError:
            pass
        if not first.lstrip().startswith(b"[") or path.stat().st_size > options.max_file_bytes:
            return None
        try:
            records = _parsed(first + file.read())
        except ValueError:
            return None
    if records and isinstance(records[0], dict) and field in records[0]:
        return partial(_read_list, records)
    return None


def _read_list(
    records: Sequence[Any],
    path: Path,
    source: str,
    options: ReadOptions,
) -> Iterator[Progress]:
    size = path.stat().st_size
    for number, record in enumerate(records, 1):
        read = partial(_record, record, options)
        document = document_of(read, record, source, f"record {number}", options)
        yield document, size * number // len(records)


def read_jsonl(path: Path, source: str, options: ReadOptions, name: str = "") -> Iterator[Progress]:
    """An object or a string a line. Without an id, the line's number is the id. Blank lines are
    skipped."""
    with path.open("rb") as opened:
        file, notes = as_utf8(opened)
        for line in bounded_lines(file, options.max_record_bytes):
            if not line.is_whole or line.data.strip():
                read = partial(_object, line, options)
                yield (
                    document_of(
                        read, line.data, source, f"line {line.number}", options, notes=notes
                    ),
                    line.offset + line.length,
                )


def _object(line: Line, options: ReadOptions) -> Mapping[str, Any]:
    if not line.is_whole:
        raise Unfit(f"the line has {line.length} bytes, allowed are {options.max_record_bytes}")
    try:
        value = _parsed(line.decoded())
    except ValueError as error:
        raise Unfit(f"not JSON: {error}") from None
    return _record(value, options)


def _record(value: Any, options: ReadOptions) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {options.text_field or "text": value}
    if not isinstance(value, dict):
        raise Unfit("the record is neither an object nor a string")
    return value


# Rows read at a time
ROWS = 64


def read_parquet(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """One document a row. Raises LoadError without pyarrow."""
    require_extra("parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    size, number = path.stat().st_size, 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            total = max(1, file.metadata.num_rows)
            check_text_column(file.schema_arrow.names, options)
            for batch in file.iter_batches(batch_size=ROWS):
                for row in range(batch.num_rows):
                    number += 1
                    record: dict[str, Any] = {}
                    read = partial(_fill, record, batch, row, options)
                    location = f"row {number}"
                    document = document_of(read, record, source, location, options)
                    yield document, size * number // total
    except (pyarrow.ArrowException, OSError, Unfit) as error:
        yield Rejection(source, f"after row {number}", f"not readable as parquet: {error}"), size


def _fill(record: dict[str, Any], batch: Any, row: int, options: ReadOptions) -> Mapping[str, Any]:
    """Read a row's cells into `record`, and return the non-empty ones. Raises Unfit."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            record[name] = column[row].as_py()
        except UnicodeDecodeError as error:
            raise Unfit(f"`{name}` is not UTF-8: byte {error.start} of the cell") from None
    return {
        name: value
        for name, value in record.items()
        if value is not None or name == (options.text_field or "text")
    }
