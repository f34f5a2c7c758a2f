"""Files that are one document: the title and the text of a file's bytes, by its ending."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridtei.errors import LoadError
from hybridtei.retrieval.ingest.document import Document, Outline, Rejection
from hybridtei.retrieval.ingest.formats import Parse, parser_of
from hybridtei.retrieval.ingest.markdown import plain
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.tables import metadata_of
from hybridtei.retrieval.ingest.text import (
    HEADING_MARK,
    MARKS_OF_LINES,
    TABLE_END,
    TABLE_MARK,
    Content,
    Unfit,
    fence_after,
    normalised,
    words_of,
)


def read_whole(
    path: Path, source: str, options: ReadOptions, name: str = ""
) -> Document | Rejection:
    """Read the file as one document with its label as id. `name`: the file's, if the path has
    another. Raises LoadError if the library for its kind is missing."""
    size = path.stat().st_size
    if size > options.max_file_bytes:
        reason = f"the file has {size} bytes, allowed are {options.max_file_bytes}"
        return Rejection(source, "file", reason, document_id=source)

    def parse(data: bytes, options: ReadOptions) -> Content:
        return parser_of(name or path.name, data)(data, options)

    return document_from(path.read_bytes(), parse, (source, source, "file"), options)


def document_from(
    data: bytes,
    parse: Parse,
    place: tuple[str, str, str],
    options: ReadOptions,
) -> Document | Rejection:
    """The document that a reader makes of these bytes, or a rejection. `place`: its source, id and
    location."""
    source, document_id, location = place
    try:
        content = parse(data, options)
        _check_length(sum(map(len, content.pages)), options)
        words = words_of(content.pages)
        pages = [
            normalised(page, words, is_wrapped=content.is_wrapped).strip() for page in content.pages
        ]
        text, outline = outline_of("\n\n".join(filter(None, pages)))
        _check_length(len(text), options)
        if not text and not content.title:
            raise Unfit("holds no text")
    except Unfit as error:
        return Rejection(source, location, str(error), data, document_id)
    except (LoadError, OSError, MemoryError):
        raise
    except Exception as error:
        # a library can raise anything for a broken file, which stops no other file
        reason = f"not readable: {type(error).__name__}: {error}"[:300]
        return Rejection(source, location, reason, data, document_id)
    title = " ".join(normalised(content.title or "").split()) or None
    starts: list[tuple[int, int]] = []
    if content.is_paged:
        starts = _starts([MARKS_OF_LINES.sub("", page) for page in pages])
    metadata, notes = {}, list(content.notes)
    try:
        metadata = metadata_of(content.metadata, options)
    except Unfit as error:
        notes.append(f"without metadata: {error}")
    return Document(
        source, document_id, text, title, metadata, location, notes, pages=starts, outline=outline
    )


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
