"""Files that are one document: the title and the text of a file's bytes, by its ending."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hybridtei.errors import LoadError
from hybridtei.retrieval.ingest.books import read_epub, read_xml
from hybridtei.retrieval.ingest.document import Document, Outline, Rejection
from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.kinds import (
    read_calendar,
    read_mail,
    read_manual,
    read_notebook,
    read_subtitles,
    read_text,
    unzipped,
)
from hybridtei.retrieval.ingest.markdown import plain, read_markdown
from hybridtei.retrieval.ingest.office import read_docx, read_older, read_pptx, read_xlsx
from hybridtei.retrieval.ingest.opendocument import read_odf
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.pdf import read_pdf
from hybridtei.retrieval.ingest.tables import metadata_of
from hybridtei.retrieval.ingest.text import (
    BINARY,
    HEADING_MARK,
    MARKS_OF_LINES,
    TABLE_END,
    TABLE_MARK,
    Content,
    Unfit,
    compounds_of,
    fence_after,
    normalised,
)

# A dotted line of a table of contents, such as "2.1 Install . . . . 7".
ENTRY = re.compile(r"\.[ \t]?\.[ \t]?\.[ \t]?\.[ \t]*(\d{1,5})[ \t]*$")
MAX_ENTRY, LEAST_ENTRIES = 40, 3
Parse = Callable[[bytes, ReadOptions], Content]


def read_whole(path: Path, source: str, options: ReadOptions) -> Document | Rejection:
    """Read the file as one document with its label as id. Raises LoadError if the library for its
    kind is missing."""
    data = b""
    try:
        size = path.stat().st_size
        if size > options.max_file_bytes:
            raise Unfit(f"the file has {size} bytes, allowed are {options.max_file_bytes}")
        data = path.read_bytes()
        name = path.name
        if name.lower().endswith(".gz"):
            name, data = path.stem, unzipped(data, options)
        content = _parsed(name, data, options)
        _check_length(sum(map(len, content.pages)), options)
        compounds = compounds_of(content.pages)
        pages = [normalised(page, compounds).strip() for page in content.pages]
        entries = [_without_entries(page) for page in pages]
        text, outline = outline_of("\n\n".join(filter(None, entries)))
        _check_length(len(text), options)
        if not text and not content.title:
            raise Unfit("holds no text")
    except Unfit as error:
        return Rejection(source, "file", str(error), data, source)
    except (LoadError, OSError, MemoryError):
        raise
    except Exception as error:
        # a library can raise anything for a broken file, which stops no other file
        reason = f"not readable: {type(error).__name__}: {error}"[:300]
        return Rejection(source, "file", reason, data, source)
    title = " ".join(normalised(content.title or "").split()) or None
    starts: list[tuple[int, int]] = []
    if content.is_paged:
        starts = _starts([MARKS_OF_LINES.sub("", page) for page in entries])
    metadata, notes = {}, list(content.notes)
    if entries != pages:
        notes.append("dotted lines of a table of contents were left out")
    try:
        metadata = metadata_of(content.metadata, options)
    except Unfit as error:
        notes.append(f"without metadata: {error}")
    return Document(
        source, source, text, title, metadata, "file", notes, pages=starts, outline=outline
    )


def _parsed(name: str, data: bytes, options: ReadOptions) -> Content:
    """The content of a file of this name. Raises Unfit, which for unknown endings names the
    ending."""
    ending = Path(name).suffix.lower()
    try:
        return parser_of(name)(data, options)
    except Unfit as error:
        if ending in PARSERS or not str(error).startswith(BINARY):
            raise
        kind = f"files ending in {ending!r}" if ending else "files without an ending"
        raise Unfit(f"no reader for {kind} of binary data") from None


def _without_entries(text: str) -> str:
    """The text without the dotted lines of a table of contents: three or more with page numbers
    that do not fall, and blank lines between them."""
    lines: list[str] = []
    numbers: list[int] = []
    # Where the run of dotted lines begins.
    first = 0
    # The last line, "-", ends a run at the end of the text
    for line in [*text.split("\n"), "-"]:
        entry = ENTRY.search(line[-MAX_ENTRY:])
        if entry is not None:
            numbers.append(int(entry[1]))
        elif line.strip():
            if len(numbers) >= LEAST_ENTRIES and numbers == sorted(numbers):
                lines[first:] = [""]
            numbers.clear()
            first = len(lines) + 1
        lines.append(line)
    return "\n".join(lines[:-1]).strip()


def outline_of(text: str) -> tuple[str, Outline]:
    """(the text without marks of lines, the outline that the marks describe)."""
    lines: list[str] = []
    places: list[tuple[int, str, str]] = []
    joins: list[tuple[int, int]] = []
    path: list[tuple[int, str]] = []
    # The first of the headings that no line has followed, and the first line of an open fence.
    heading: int | None = None
    fence, fence_start, start = "", 0, 0
    for line in text.split("\n"):
        if line == TABLE_END:
            places.append((start, _joined(path), ""))
            continue
        words = MARKS_OF_LINES.sub("", line)
        end = start + len(words) + 1
        before, fence = fence, fence_after(words, fence)
        if fence and not before:
            fence_start = start if heading is None else heading
        elif before and not fence:
            joins.append((fence_start, end - 1))
        if heading is not None and words.strip(" \t-="):
            joins.append((heading, start))
            heading = None
        if line.startswith(HEADING_MARK):
            level = int(line[1])
            path = [part for part in path if part[0] < level]
            path.append((level, plain(words.strip(" \t#")) or ""))
            places.append((start, _joined(path), ""))
            heading = start
        elif line.startswith(TABLE_MARK):
            places.append((end, _joined(path), words))
            heading = start
        lines.append(words)
        start = end
    return "\n".join(lines), Outline(places, joins)


def _joined(path: Sequence[tuple[int, str]]) -> str:
    return " > ".join(words for _, words in path if words)


def _starts(pages: Sequence[str]) -> list[tuple[int, int]]:
    """(start in the document's text, number) of each page with text."""
    starts, start = [], 0
    for number, page in enumerate(pages, 1):
        if page:
            starts.append((start, number))
            start += len(page) + len("\n\n")
    return starts


def _check_length(characters: int, options: ReadOptions) -> None:
    """Raises Unfit for a text that is too long."""
    if characters > options.max_document_characters:
        raise Unfit(
            f"the text has {characters} characters, allowed are {options.max_document_characters}"
        )


PARSERS = {
    **dict.fromkeys((".md", ".markdown", ".mdx", ".qmd", ".rmd"), read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    **dict.fromkeys((".xml", ".svg", ".rss", ".atom", ".docbook", ".dbk", ".opml"), read_xml),
    **dict.fromkeys((".docx", ".docm", ".dotx"), read_docx),
    **dict.fromkeys((".doc", ".dot", ".xls", ".ppt", ".pps"), read_older),
    **dict.fromkeys((".odt", ".ods", ".odp"), read_odf),
    **dict.fromkeys((".xlsx", ".xlsm"), read_xlsx),
    **dict.fromkeys((".pptx", ".pptm"), read_pptx),
    **dict.fromkeys((".ics", ".ical"), read_calendar),
    **dict.fromkeys((".vtt", ".srt"), read_subtitles),
    **{f".{section}": read_manual for section in range(1, 10)},
    ".pdf": read_pdf,
    ".epub": read_epub,
    ".ipynb": read_notebook,
    **dict.fromkeys((".eml", ".mht", ".mhtml"), read_mail),
}
# Endings of files that are never text, although their bytes may look like it.
OTHERS = frozenset(
    (".rtf", ".ps", ".eps", ".pem", ".key", ".crt", ".map", ".lock", ".pyc", ".so", ".zip", ".tar")
)


def parser_of(name: str) -> Parse:
    """The reader of a file's ending; of plain text for other endings. Raises Unfit."""
    ending = Path(name).suffix.lower()
    if ending in OTHERS:
        raise Unfit(f"no reader for files ending in {ending!r}")
    # A manual's section, such as .3pm
    known = re.sub(r"^(\.[1-9])[a-z]{1,4}$", r"\1", ending)
    return PARSERS.get(known, partial(read_text, suffix=ending))
