"""What all readers share: options and bounds, lines of a bounded length, the fields of a record, and the quarantine.

The quarantine is a file of JSON lines that each ingest writes anew:

    {"source": "data/rows.csv", "location": "line 7", "reason": "the row has 3 cells, the header 4", "excerpt": "…"}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import orjson
from msgspec import Meta, Struct

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.ingest.chunking import Rejection

EXCERPT_CHARACTERS = 200
MAX_RECORD_BYTES = 1_000_000
MAX_DOCUMENT_CHARACTERS = 10_000_000  # and so the most chunks a document may have


class ReadOptions(Struct, frozen=True, kw_only=True):
    """How files are read. `text_field`, `id_field`: names in records; None takes `text`, and `_id` or `id`.

    A record is a line of jsonl, a row of csv or parquet; `max_file_bytes` bounds the files that are one document each.
    """

    text_field: Annotated[
        str | None, Meta(description="field of the text in jsonl, csv, parquet [default: text]", extra={"metavar": "NAME"})
    ] = None
    id_field: Annotated[
        str | None,
        Meta(description="field of the id there [default: _id or id, else the line's number]", extra={"metavar": "NAME"}),
    ] = None
    max_record_bytes: Annotated[int, Meta(description="of a line")] = MAX_RECORD_BYTES
    max_file_bytes: int = 100_000_000
    max_document_characters: int = MAX_DOCUMENT_CHARACTERS
    max_metadata_bytes: int = 64_000
    max_id_characters: int = 512

    def as_dict(self) -> dict[str, Any]:
        """These fields alone, of options that may have more."""
        return {name: getattr(self, name) for name in ReadOptions.__struct_fields__}


def excerpt(data: bytes | str) -> str:
    """The first characters of a record, printable."""
    if isinstance(data, bytes):
        data = data[: 4 * EXCERPT_CHARACTERS].decode(errors="backslashreplace")
    start = data[:EXCERPT_CHARACTERS]
    return start.encode(errors="backslashreplace").decode()


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KEPT_BYTES = 1000  # of a line that is too long
SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """`data`: without the line end. `offset`: of its first byte in the file. `length`: of the whole line, in bytes; where the
    line is too long, `data` is only its beginning."""

    number: int
    offset: int
    data: bytes
    length: int
    is_whole: bool = True


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """Every line, numbered from 1; a byte order mark at the start is left out."""
    number = offset = 0
    while head := file.readline(max_bytes + len(BYTE_ORDER_MARK) + 2):
        number += 1
        length, last = len(head), head
        while not last.endswith(b"\n") and (last := file.readline(SKIP_BYTES)):
            length += len(last)
        ends = (last or head).endswith(b"\n")
        data = head.removesuffix(b"\n").removesuffix(b"\r")
        mark = BYTE_ORDER_MARK if number == 1 and data.startswith(BYTE_ORDER_MARK) else b""
        data = data[len(mark) :]
        if len(head) == length and len(data) <= max_bytes:
            yield Line(number, offset + len(mark), data, len(data))
        else:
            yield Line(number, offset + len(mark), data[:KEPT_BYTES], length - ends - len(mark), is_whole=False)
        offset += length


def decode_line(line: Line) -> str:
    """The line's text. Raises ValueError, which names the byte of the file that is not UTF-8."""
    try:
        return line.data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {line.offset + error.start} of the file") from None


ID_FIELDS = ("_id", "id")
TITLE_FIELD = "title"


class Unfit(ValueError):
    """Why a record is no document: the reason in the quarantine. `document_id`: of the record, if it has one."""

    document_id: str | None = None


def id_of(record: Mapping[str, Any], options: ReadOptions, fallback_id: str) -> str | None:
    """The document id of a record, also of one that is no document; None where the id itself is unfit."""
    try:
        return _id(record, options, fallback_id)[1]
    except Unfit:
        return None


def text_and_rest(
    record: Mapping[str, Any], options: ReadOptions, fallback_id: str
) -> tuple[str, str, str | None, dict[str, Any]]:
    """(document id, text, title, metadata) of a record; `fallback_id` where it has no id. Raises Unfit."""
    field = options.text_field or "text"
    if field not in record:
        raise Unfit(f"has no `{field}`; it has {_names(record)}: name the text with --text-field")
    text = record[field]
    if not isinstance(text, str):
        raise Unfit(f"`{field}` is {_kind(text)}, should be a string")
    title = record.get(TITLE_FIELD)
    if title is not None and not isinstance(title, str):
        raise Unfit(f"`{TITLE_FIELD}` is {_kind(title)}, should be a string")
    if not text.strip() and not (title or "").strip():
        raise Unfit(f"`{field}` is empty")
    if len(text) > options.max_document_characters:
        raise Unfit(f"`{field}` has {len(text)} characters, allowed are {options.max_document_characters}")
    id_field, document_id = _id(record, options, fallback_id)
    rest = {name: value for name, value in record.items() if name not in (field, TITLE_FIELD, id_field)}
    return document_id, text, title or None, _metadata(rest, options)


def _id(record: Mapping[str, Any], options: ReadOptions, fallback: str) -> tuple[str | None, str]:
    names = (options.id_field,) if options.id_field else ID_FIELDS
    name = next((name for name in names if name in record), None)
    if name is None:
        if options.id_field:
            raise Unfit(f"has no `{options.id_field}`; it has {_names(record)}: name the id with --id-field")
        return None, fallback
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Unfit(f"`{name}` is {_kind(value)}, should be a string or a whole number")
    document_id = str(value)
    if not 1 <= len(document_id) <= options.max_id_characters:
        raise Unfit(f"`{name}` has {len(document_id)} characters, should have 1 to {options.max_id_characters}")
    return name, document_id


def _metadata(rest: Mapping[str, Any], options: ReadOptions) -> dict[str, Any]:
    """The metadata in JSON's types: dates as ISO 8601, other types as text. Raises Unfit."""
    if not rest:
        return {}
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
        raise Unfit(f"`{path}` is {value}, which is no number that can be stored")
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
    names = [f"`{str(name)[:40]}`" for name in record]
    return ", ".join(names[:20]) + ("…" if len(names) > 20 else "") if names else "no fields"


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
