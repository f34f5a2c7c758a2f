"""Files that are one document: the title and the text of a file's bytes, by its ending."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from hybridtei.retrieval.ingest.chunking import Document, Rejection
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.tables import Unfit
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
    rb"""<meta[^>]{0,200}charset\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE
)
HEADING = re.compile(r"^#\s+(.+?)\s*#*\s*$", re.MULTILINE)
MAX_PAGES = 20_000

Parse = Callable[[bytes, ReadOptions], tuple[str | None, str]]


def read_whole(path: Path, source: str, options: ReadOptions) -> Document | Rejection:
    """Read the file as one document with its label as id. Raises LoadError if the library for its kind is missing."""
    data = b""
    try:
        size = path.stat().st_size
        if size > options.max_file_bytes:
            raise Unfit(f"the file has {size} bytes, allowed are {options.max_file_bytes}")
        data = path.read_bytes()
        title, text = PARSERS[path.suffix.lower()](data, options)
        if len(text) > options.max_document_characters:
            raise Unfit(
                f"the text has {len(text)} characters, allowed are {options.max_document_characters}"
            )
        if not text.strip():
            raise Unfit("holds no text")
    except ValueError as error:
        return Rejection(source, "file", str(error), data, source)
    return Document(source, source, text, title, {}, "file")


def _utf8(data: bytes) -> str:
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        mark = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
        raise Unfit(f"not UTF-8: byte {mark + error.start} of the file") from None


def _markdown(data: bytes, options: ReadOptions) -> tuple[str | None, str]:
    """The unchanged Markdown. A first-level heading in the first line is the title."""
    text = _utf8(data).strip()
    first, _, rest = text.partition("\n")
    heading = HEADING.match(first)
    return (heading[1], rest) if heading and rest.strip() else (None, text)


def _html(data: bytes, options: ReadOptions) -> tuple[str | None, str]:
    """The visible text, one block a line, without scripts, styles and the head."""
    require_extra("qdrant", "selectolax")
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(_html_text(data))
    named = tree.css_first("title")
    title = " ".join(named.text().split()) if named is not None else None
    tree.strip_tags(list(HTML_UNSEEN))
    for node in tree.css(HTML_BLOCKS):
        node.insert_before(BREAK)
        node.insert_after(BREAK)
    seen = tree.body.text(deep=True, separator="") if tree.body is not None else ""
    lines = (" ".join(block.split()) for block in seen.split(BREAK))
    return title or None, "\n".join(line for line in lines if line)


def _html_text(data: bytes) -> str:
    """Decode a page as UTF-8, or else in its declared encoding."""
    try:
        return _utf8(data)
    except Unfit:
        declared = CHARSET.search(data[:2048])
        if declared is None:
            raise
        try:
            return data.decode(declared[1].decode())
        except (LookupError, UnicodeDecodeError):
            raise Unfit(f"not in the encoding it declares, {declared[1].decode()}") from None


def _pdf(data: bytes, options: ReadOptions) -> tuple[str | None, str]:
    """The text of all pages. Raises Unfit for a PDF without text."""
    require_extra("qdrant", "pypdf")
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # pypdf warns of every oddity
    try:
        reader = pypdf.PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unfit("the PDF is encrypted")
        pages: list[str] = []
        characters = 0
        for number, page in enumerate(reader.pages):
            pages.append(page.extract_text().encode(errors="replace").decode())
            characters += len(pages[-1])
            if characters > options.max_document_characters or number >= MAX_PAGES:
                raise Unfit(
                    f"more than {options.max_document_characters} characters or {MAX_PAGES} pages"
                )
        title = reader.metadata.title if reader.metadata is not None else None
    except Unfit:
        raise
    except Exception as error:  # a broken file can raise any exception
        raise Unfit(f"not readable as PDF: {type(error).__name__}: {error}"[:500]) from None
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise Unfit("the PDF holds no text: its pages may be pictures")
    return (str(title).strip() or None) if title else None, text


PARSERS: dict[str, Parse] = {
    **dict.fromkeys((".txt", ".text"), lambda data, options: (None, _utf8(data))),
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".pdf": _pdf,
}
