"""CSV and TSV: a row is a document, or the table, if no column is the text. Separator and header
are found in the first lines, and a bad row spoils no other."""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from hybridtei.retrieval.ingest.document import Document, Outline, Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.tables import (
    Found,
    Line,
    Progress,
    bounded_lines,
    check_text_column,
    document_of,
    value_of,
)
from hybridtei.retrieval.ingest.text import Unfit, as_utf8, normalised

SEPARATORS = ",;\t|"
SAMPLE_LINES, MOST_LINES = 20, 1000
TABBED = (".tsv", ".tab")
YEAR = re.compile("(1[5-9]|20)[0-9]{2}")
WORD = re.compile(r"[^\W\d]{2}")
FIELDS = ("text", "title", "id", "_id")


def read_csv(path: Path, source: str, options: ReadOptions, name: str = "") -> Iterator[Progress]:
    """A document for each row. In other columns, numbers are numbers if all of the column's cells
    are. `name`: the file's, if the path has another."""
    # The module has one limit for the whole process
    csv.field_size_limit(options.max_record_bytes)
    suffix = Path(name).suffix or path.suffix
    with path.open("rb") as opened:
        numbers = _number_columns(_rows(opened, suffix, options)[0])
    with path.open("rb") as opened:
        rows, notes = _rows(opened, suffix, options)
        if options.text_field is None and "text" not in rows.header:
            yield _table(rows, source, options, notes), path.stat().st_size
            return
        check_text_column(rows.header, options)
        for line, cells, reason in rows:
            location = f"line {line.number}"
            if reason is not None:
                yield Rejection(source, location, reason, line.data), rows.offset
            elif any(cells):
                read = partial(_record, rows.header, cells)
                document = document_of(
                    read, line.data, source, location, options, notes=notes, numbers=numbers
                )
                yield document, rows.offset


def _table(rows: _Rows, source: str, options: ReadOptions, notes: Sequence[str]) -> Found:
    """The rows as one document, a line each below the names of the columns."""
    lines: list[str] = []
    room = options.max_document_characters
    words = 0
    for line, row, reason in rows:
        cells = [line.decoded()]
        if reason is None:
            cells = row
        words += any(map(WORD.search, cells))
        lines.append(" | ".join(" ".join(cell.split()) for cell in cells))
        room -= len(lines[-1])
        if room < 0:
            raise Unfit("the table is longer than allowed: name its text with --text-field")
    if 2 * words <= len(lines):
        return Rejection(
            source, "file", "tables without words", document_id=source, is_left_out=True
        )
    text = normalised("\n".join(lines), is_wrapped=False).strip()
    outline = Outline([(0, "", " | ".join(rows.header))])
    note = "a table without a column `text` is one document: --text-field makes one of each row"
    columns = {"columns": rows.header}
    return Document(source, source, text, None, columns, "file", [*notes, note], outline=outline)


def _rows(opened: BinaryIO, suffix: str, options: ReadOptions) -> tuple[_Rows, list[str]]:
    """(the rows of an open file, notes of its encoding)."""
    file, notes = as_utf8(opened)
    return _Rows(bounded_lines(file, options.max_record_bytes), suffix, options), notes


def _number_columns(rows: _Rows) -> frozenset[str]:
    """The columns whose cells are numbers or empty."""
    numbers = dict(enumerate(rows.header))
    for _, cells, reason in rows:
        if not numbers:
            break
        if reason is None and len(cells) == len(rows.header):
            for place in [place for place in numbers if isinstance(value_of(cells[place]), str)]:
                if cells[place]:
                    del numbers[place]
    return frozenset(numbers.values())


def _record(header: Sequence[str], cells: Sequence[str]) -> Mapping[str, str]:
    if len(cells) != len(header):
        raise Unfit(f"the row has {len(cells)} cells, the header {len(header)}")
    return dict(zip(header, cells, strict=True))


class _Rows:
    """Iterates over (first line, cells, the reason why it is none). `offset`: of the bytes read so
    far."""

    def __init__(self, lines: Iterator[Line], suffix: str, options: ReadOptions) -> None:
        self._lines, self._most = lines, options.max_record_bytes
        self._waiting: deque[Line] = deque(islice(lines, SAMPLE_LINES))
        self.offset = 0
        self._separator = "\t"
        hint = self._waiting[0].decoded().strip().lower() if self._waiting else ""
        if hint.startswith("sep=") and len(hint) <= 5:
            self._waiting.popleft()
            self._separator = hint[4:] or "\t"
        elif suffix.lower() not in TABBED:
            self._separator = self._sniffed()
        names: list[str] = []
        for line, cells, reason in islice(self, 1):
            if reason is not None:
                raise Unfit(f"the header is not readable: {reason}")
            names = cells
            if not _is_header(cells, options):
                self._waiting.appendleft(line)
                names = self._unnamed(len(cells), options)
        self.header = _distinct([name.strip() for name in names])

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> tuple[Line, list[str], str | None]:
        line = self._next_line()
        if not line.is_whole:
            return line, [], f"the line has {line.length} bytes, allowed are {self._most}"
        # Further lines of a row with line ends in quotes. They become rows of their own if it is
        # none
        more: list[Line] = []
        reason: str | None = None
        cells: list[str] = []

        def lines() -> Iterator[str]:
            """The line, and those that the parser asks for inside a quoted cell."""
            nonlocal reason
            size = line.length
            text = line.decoded()
            while True:
                yield text
                following = self._next_line(None)
                if following is not None:
                    more.append(following)
                    size += following.length
                if size > self._most:
                    reason = f"the row has more than {self._most} bytes"
                elif following is None or len(more) > MOST_LINES:
                    reason = "a quote is not closed"
                if reason is not None or following is None:
                    return
                text = "\n" + following.decoded()

        try:
            # Not line by line: the parser ends a quoted cell's line without its line end
            rows = csv.reader(lines(), delimiter=self._separator, skipinitialspace=True)
            cells = next(rows, [])
        except csv.Error as error:
            reason = str(error)
        # The first row is read before there is a header
        header = getattr(self, "header", cells)
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()
        if more and len(cells) != len(header):
            reason = reason or "a quote is not closed"
        if reason is not None:
            self._waiting.extendleft(reversed(more))
            plain = line.decoded().split(self._separator)
            # Programs that write tabs may use no quotes
            if self._separator == "\t" and len(plain) == len(header):
                return line, plain, None
        return line, cells, reason

    def _next_line(self, *default: None) -> Any:
        line = self._waiting.popleft() if self._waiting else next(self._lines, *default)
        if line is not None:
            self.offset = max(self.offset, line.offset + line.length)
        return line

    def _sniffed(self) -> str:
        """The separator that gives the most lines of the sample one number of cells."""

        def quality(separator: str) -> tuple[int, int]:
            """(the lines with the usual number of cells, this number)."""
            counts = [
                len(re.sub(r'"[^"]*"', "", line.decoded()).split(separator))
                for line in self._waiting
                if line.is_whole
            ]
            usual = max(counts, key=counts.count, default=1)
            if usual == 1:
                return 0, usual
            return counts.count(usual), usual

        return max(SEPARATORS, key=quality)

    def _unnamed(self, count: int, options: ReadOptions) -> list[str]:
        """Names of columns without a header; the one with the longest cells is the text, unless
        those are numbers."""
        columns: list[list[str]] = [[] for _ in range(count)]
        for line in self._waiting:
            cells = line.decoded().split(self._separator)
            for column, cell in zip(columns, cells, strict=False):
                column.append(cell)
        lengths = [sum(map(len, column)) for column in columns]
        place = lengths.index(max(lengths))
        names = [f"column {number}" for number in range(1, count + 1)]
        if 2 * sum(WORD.search(cell) is not None for cell in columns[place]) >= len(columns[place]):
            names[place] = options.text_field or "text"
        return names


def _is_header(cells: Sequence[str], options: ReadOptions) -> bool:
    """True if a first row holds names: a known one, or short words and perhaps years, and at most
    one empty cell."""
    names = [cell.strip() for cell in cells]
    field_names = {*FIELDS, options.text_field, options.id_field}
    if {name.lower() for name in names} & {name.lower() for name in field_names if name}:
        return True
    words = [name for name in names if name and not YEAR.fullmatch(name)]
    if not words or names.count("") > 1:
        return False
    return not any(value_of(word) != word or len(word) > 60 for word in words)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names: known ones in lower case, and a second column of a name with its number."""
    distinct: dict[str, None] = {}
    counts: Counter[str] = Counter()
    present = set(names)
    for name in names:
        lower = name.lower()
        plain = lower if lower in FIELDS and lower not in present else name
        first = plain
        while plain in distinct:
            counts[first] += 1
            plain = f"{first} {counts[first] + 1}"
        distinct[plain] = None
    return list(distinct)
