"""Files that are one document: the title and the text of a file's bytes, by its ending."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridtei.retrieval.ingest.chunking import Document, Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.pdf import read_pdf
from hybridtei.retrieval.ingest.text import Content, Unfit, compounds_of, decoded, normalised
from hybridtei.system.machine import require_extra

HTML_BLOCKS = (
    "address,article,aside,blockquote,br,caption,dd,div,dl,dt,fieldset,figcaption,figure,footer,form,h1,h2,h3,h4,h5,h6,header,hr,"
    "li,main,nav,ol,p,pre,section,table,td,th,tr,ul"
)
HTML_UNSEEN = (
    "script",
    "style",
    "noscript",
    "template",
    "svg",
    "math",
    "iframe",
    "object",
    "select",
    "head",
)
BREAK = "\x1e"  # marks the end of a block until white space is collapsed
CHARSET = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""",
    re.IGNORECASE,
)
HEADING = re.compile(r"^#\s+(.+?)\s*#*\s*$", re.MULTILINE)

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
        text = "\n\n".join(filter(None, pages))
        _check_length(len(text), options)
        if not text:
            raise Unfit("holds no text")
    except ValueError as error:
        return Rejection(source, "file", str(error), data, source)
    title = " ".join(normalised(content.title or "").split()) or None
    starts = _starts(pages) if content.is_paged else ()
    return Document(source, source, text, title, {}, "file", content.notes, pages=starts)


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


def _markdown(data: bytes, options: ReadOptions) -> Content:
    """The unchanged Markdown. A first-level heading in the first line is the title."""
    text, notes = decoded(data)
    first, _, rest = text.strip().partition("\n")
    heading = HEADING.match(first)
    if heading and rest.strip():
        return Content(heading[1], [rest], notes)
    return Content(None, [text], notes)


def _html(data: bytes, options: ReadOptions) -> Content:
    """The visible text, one block a line, without scripts, styles and the head."""
    require_extra("qdrant", "selectolax")
    from selectolax.lexbor import LexborHTMLParser

    declared = CHARSET.search(data[:2048])
    text, notes = decoded(data, declared[1].decode() if declared is not None else None)
    tree = LexborHTMLParser(text)
    named = tree.css_first("title")
    title = " ".join(named.text().split()) if named is not None else None
    tree.strip_tags(list(HTML_UNSEEN))
    for node in tree.css(HTML_BLOCKS):
        node.insert_before(BREAK)
        node.insert_after(BREAK)
    seen = tree.body.text(deep=True, separator="") if tree.body is not None else ""
    lines = (" ".join(block.split()) for block in seen.split(BREAK))
    return Content(title, ["\n".join(line for line in lines if line)], notes)


PARSERS: dict[str, Parse] = {
    **dict.fromkeys((".txt", ".text"), _plain),
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".pdf": read_pdf,
}
