"""Files that are one document: the title and the text of a file's bytes, by its ending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hybridtei.retrieval.ingest.chunking import Document, Rejection
from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.markdown import read_markdown
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.pdf import read_pdf
from hybridtei.retrieval.ingest.tables import metadata_of
from hybridtei.retrieval.ingest.text import (
    MARKS_OF_LINES,
    Content,
    Unfit,
    compounds_of,
    decoded,
    normalised,
)

Parse = Callable[[bytes, ReadOptions], Content]


def read_whole(path: Path, source: str, options: ReadOptions) -> Document | Rejection:
    """Read the file as one document with its label as id. Raises LoadError if the library for its kind is missing."""
    data = b""
    try:
        size = path.stat().st_size
        if size > options.max_file_bytes:
            raise Unfit(f"the file has {size} bytes, allowed are {options.max_file_bytes}")
        data = path.read_bytes()
        content = PARSERS[path.suffix.lower()](data, options)
        _check_length(sum(map(len, content.pages)), options)
        compounds = compounds_of(content.pages)
        pages = [normalised(page, compounds).strip() for page in content.pages]
        text = MARKS_OF_LINES.sub("", "\n\n".join(filter(None, pages)))
        _check_length(len(text), options)
        if not text and not content.title:
            raise Unfit("holds no text")
    except ValueError as error:
        return Rejection(source, "file", str(error), data, source)
    title = " ".join(normalised(content.title or "").split()) or None
    starts = _starts(pages) if content.is_paged else ()
    metadata, notes = {}, list(content.notes)
    try:
        metadata = metadata_of(content.metadata, options)
    except Unfit as error:
        notes.append(f"without metadata: {error}")
    return Document(source, source, text, title, metadata, "file", notes, pages=starts)


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


def _plain(data: bytes, options: ReadOptions) -> Content:
    text, notes = decoded(data)
    return Content(None, [text], notes)


PARSERS: dict[str, Parse] = {
    **dict.fromkeys((".txt", ".text"), _plain),
    **dict.fromkeys((".md", ".markdown"), read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    ".pdf": read_pdf,
}
