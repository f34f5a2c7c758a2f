"""CSV and TSV: a row is a document. Separator and header are found in the first lines, and a bad
row spoils no other."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from hybridtei.retrieval.ingest.document import Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.tables import (
    Line,
    Progress,
    bounded_lines,
    check_text_column,
    document_of,
    value_of,
)
from hybridtei.retrieval.ingest.text import Unfit, as_utf8

SEPARATORS = ",;\t|"
SAMPLE_LINES, MOST_LINES = 20, 1000
FIELDS = ("text", "title", "id", "_id")


def read_csv(path: Path, source: str, options: ReadOptions) -> Iterator[Progress]:
    """A document for each row. Numbers in other columns are numbers in the metadata."""
    # The module has one limit for the whole process
    csv.field_size_limit(options.max_record_bytes)
    with path.open("rb") as opened:
        file, notes = as_utf8(opened)
        rows = _Rows(bounded_lines(file, options.max_record_bytes), path.suffix, options)
        check_text_column(rows.header, options)
        for line, cells, reason in rows:
            location = f"line {line.number}"
            if reason is not None:
                yield Rejection(source, location, reason, line.data), rows.offset
            elif any(cells):
                read = partial(_record, rows.header, cells)
                document = document_of(
                    read, line.data, source, location, options, notes=notes, has_numbers=True
                )
                yield document, rows.offset


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
        self._quotes = suffix.lower() != ".tsv"
        self.offset = 0
        hint = self._waiting[0].decoded().strip().lower() if self._waiting else ""
        if hint.startswith("sep=") and len(hint) <= 5:
            self._waiting.popleft()
            self._separator = hint[4:] or "\t"
        else:
            self._separator = self._sniffed() if self._quotes else "\t"
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
        text = line.decoded()
        # Further lines of a row with line ends in quotes. They become rows of their own if it is
        # none
        more: list[Line] = []
        size = line.length
        while self._quotes and text.count('"') % 2:
            following = self._next_line(None)
            if following is not None:
                more.append(following)
                size += following.length
            if following is None or len(more) > MOST_LINES or size > self._most:
                self._waiting.extendleft(reversed(more))
                if size > self._most:
                    return line, [], f"the row has more than {self._most} bytes"
                return line, [], "a quote is not closed"
            text += "\n" + following.decoded()
        try:
            cells = self._cells(text)
        except csv.Error as error:
            self._waiting.extendleft(reversed(more))
            return line, [], str(error)
        # The first row is read before there is a header
        header = getattr(self, "header", cells)
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()
        if more and len(cells) != len(header):
            self._waiting.extendleft(reversed(more))
            return line, [], "a quote is not closed"
        return line, cells, None

    def _next_line(self, *default: None) -> Any:
        line = self._waiting.popleft() if self._waiting else next(self._lines, *default)
        if line is not None:
            self.offset = max(self.offset, line.offset + line.length)
        return line

    def _cells(self, text: str) -> list[str]:
        if not self._quotes:
            return text.split(self._separator)
        # Not `splitlines`, which also splits a cell at U+2028 and others
        rows = list(csv.reader(StringIO(text, "\n"), delimiter=self._separator, strict=True))
        return rows[0] if rows else []

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
        """Names of columns without a header; the one with the longest cells is the text."""
        lengths = [0] * count
        for line in self._waiting:
            for place, cell in enumerate(line.decoded().split(self._separator)[:count]):
                lengths[place] += len(cell)
        names = [f"column {place}" for place in range(1, count + 1)]
        names[lengths.index(max(lengths))] = options.text_field or "text"
        return names


def _is_header(cells: Sequence[str], options: ReadOptions) -> bool:
    """True if a first row holds names: a known one, or neither numbers nor sentences."""
    names = {cell.strip().lower() for cell in cells}
    field_names = {*FIELDS, options.text_field, options.id_field}
    if names & {name.lower() for name in field_names if name}:
        return True
    return not any(value_of(cell) != cell or len(cell) > 60 or not cell.strip() for cell in cells)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names: known ones in lower case, and a second column of a name with its number."""
    distinct: list[str] = []
    for name in names:
        plain = name.lower() if name.lower() in FIELDS and name.lower() not in names else name
        number = 2
        while plain in distinct:
            plain = f"{name} {number}"
            number += 1
        distinct.append(plain)
    return distinct
