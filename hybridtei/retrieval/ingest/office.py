"""Office documents, books and XML: their elements are renamed to those of HTML, which is then read.

Sizes are bounded before a file of an archive is unfolded. No entity is expanded, and no macro,
link or embedded file is opened.
"""

from __future__ import annotations

import html
import posixpath
import re
import zipfile
import zlib
from io import BytesIO
from urllib.parse import unquote

from hybridtei.retrieval.ingest.html import decoded_markup, read_html
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Content, Unfit, decoded

MAX_MEMBERS, MAX_PART_BYTES, MAX_ROWS = 10_000, 50_000_000, 100_000
# An archive may be larger than this only by this factor.
MAX_UNFOLDED, MAX_RATIO = 10_000_000, 100
OLE = b"\xd0\xcf\x11\xe0"
# HTML's names by the local names of WordprocessingML, DrawingML, SpreadsheetML and OpenDocument.
NAMES = {
    "p": "p",
    "tbl": "table",
    "table": "table",
    "worksheet": "table",
    "tr": "tr",
    "row": "tr",
    "table-row": "tr",
    "tc": "td",
    "c": "td",
    "table-cell": "td",
    "br": "br",
    "line-break": "br",
}
BLANKS = ("tab", "s", "cr")
TAG = re.compile(r"<(/?)(?:[\w.-]{1,40}:)?([\w.-]{1,80})([^<>]{0,5000})>")
# Deleted text, fields, formulas and readings of characters.
UNREAD = re.compile(
    r"<(w:delText|w:instrText|f)\b[^<>]{0,5000}(?<!/)>[^<]*</\1>|"
    r"<rPh\b[^<>]*>\s*<t>[^<]*</t>\s*</rPh>"
)
LEVEL = re.compile(r"""(?:w:val="(?:Heading|heading |Title)|outline-level=")([1-6]?)""")
TITLE = re.compile(r"<dc:title\b[^<>]{0,200}>([^<>]{1,500})</dc:title>")
CELL = re.compile(r"(<c\b[^<>]{0,300}>)\s*<v>([^<>]{0,100000})</v>")
COLUMN = re.compile(r'\br="([A-Z]{1,3})\d')
ITEM = re.compile(r"<(?:opf:)?item(ref)?\b([^<>]{0,2000})>")
ATTRIBUTE = re.compile(r"""([\w-]{1,80})\s*=\s*["']([^"']{0,2000})["']""")


class _Archive:
    """The files of an archive. Raises Unfit for one that is encrypted, broken, or unfolds too
    far."""

    def __init__(self, data: bytes, options: ReadOptions) -> None:
        if data.startswith(OLE):
            raise Unfit("is encrypted, or has an older format than its name says")
        try:
            self._zip = zipfile.ZipFile(BytesIO(data))
        except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
            raise Unfit(f"not readable as an archive: {error}") from None
        members = self._zip.infolist()
        size = sum(member.file_size for member in members)
        if size > max(MAX_UNFOLDED, MAX_RATIO * len(data)) or len(members) > MAX_MEMBERS:
            raise Unfit(f"{len(data)} bytes would become {len(members)} files of {size} bytes")
        self.names = [member.filename for member in members]

    def text(self, name: str) -> str:
        """The text of a file of XML."""
        try:
            member = self._zip.getinfo(name)
            if member.file_size > MAX_PART_BYTES:
                raise Unfit(f"{name} has {member.file_size} bytes, allowed are {MAX_PART_BYTES}")
            if member.flag_bits & 1:
                raise Unfit("is encrypted")
            data = self._zip.read(member)
        except (
            KeyError,
            NotImplementedError,
            RuntimeError,
            OSError,
            zlib.error,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            raise Unfit(f"not readable: {name}: {error}"[:300]) from None
        if b"<!ENTITY" in data:
            raise Unfit(f"{name} declares entities of XML")
        return decoded(data)[0]

    def numbered(self, pattern: str) -> list[str]:
        """The names that match, in the order of their numbers."""
        names = [name for name in self.names if re.fullmatch(pattern, name)]
        return sorted(names, key=lambda name: int((re.findall(r"\d+", name) or [0])[-1]))

    def content(
        self, parts: list[str], about: str = "docProps/core.xml", *, is_paged: bool = False
    ) -> Content:
        """These parts, and the title in the file `about`."""
        match = about in self.names and TITLE.search(self.text(about))
        title = html.unescape(match[1]) if match else None
        return Content(title, parts, is_paged=is_paged)


class _Renamer:
    """Renames tags in their order."""

    def __init__(self) -> None:
        self._heading = ""
        self._is_first_row = False
        self._cells = 0

    def __call__(self, tag: re.Match[str]) -> str:
        is_end, name, rest = tag.groups()
        if name in BLANKS:
            return " "
        if name in ("pStyle", "h") and not is_end:
            level = LEVEL.search(rest)
            self._heading = ""
            if level is None:
                return ""
            self._heading = f"h{level[1] or 1}"
            return f"<{self._heading}>"
        if name in ("p", "h") and is_end and self._heading:
            closed, self._heading = self._heading, ""
            return f"</{closed}>"
        if name not in NAMES:
            return ""
        return self._in_table(NAMES[name], is_end, rest)

    def _in_table(self, name: str, is_end: str, rest: str) -> str:
        """The tag of a table or another element of HTML. A sheet's file leaves empty cells out:
        they are added."""
        missing = 0
        if name == "table":
            self._is_first_row = not is_end
        elif name == "tr":
            # Rows without cells do not count
            self._is_first_row = self._is_first_row and not (is_end and self._cells)
            self._cells = 0
        elif name == "td" and not is_end:
            if column := COLUMN.search(rest):
                missing = max(0, _number(column[1]) - self._cells - 1)
            self._cells += missing + 1
        if name == "td" and self._is_first_row:
            name = "th"
        opened = "<td></td>" * missing + f"<{is_end}{name}>"
        return f"{opened}</{name}>" if rest.endswith("/") and name != "br" else opened


def _number(letters: str) -> int:
    """The number of a sheet's column, from 1 to 1,000."""
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return min(number, 1000)


def _words(text: str, options: ReadOptions) -> str:
    """The text of a part: its paragraphs, headings, and rows of tables."""
    rows = text.count("<row ")
    if rows > MAX_ROWS:
        raise Unfit(f"a sheet has {rows} rows, allowed are {MAX_ROWS}")
    # The same words again, for older programs
    first, *others = text.split("<mc:Fallback>")
    text = first + "".join(other.partition("</mc:Fallback>")[2] for other in others)
    page = TAG.sub(_Renamer(), UNREAD.sub("", text))
    return read_html(f"\ufeff<body>{page}".encode(), options).pages[0]


def read_docx(data: bytes, options: ReadOptions) -> Content:
    """The document, and the notes below its pages."""
    archive = _Archive(data, options)
    # Some programs write document2.xml
    names = archive.numbered(r"word/document\d*\.xml") or ["word/document.xml"]
    names += archive.numbered(r"word/(?:foot|end)notes\.xml")
    return archive.content([_words(archive.text(name), options) for name in names])


def read_odf(data: bytes, options: ReadOptions) -> Content:
    """A text, a sheet or slides of OpenDocument."""
    archive = _Archive(data, options)
    if "encryption-data" in archive.text("META-INF/manifest.xml"):
        raise Unfit("is encrypted")
    body = archive.text("content.xml").partition("<office:body>")[2]
    return archive.content([_words(body, options)], "meta.xml")


def read_pptx(data: bytes, options: ReadOptions) -> Content:
    """A page a slide, with its notes."""
    archive = _Archive(data, options)
    pages: list[str] = []
    for name in archive.numbered(r"ppt/slides/slide\d+\.xml"):
        notes = name.replace("slides/slide", "notesSlides/notesSlide")
        parts = [part for part in (name, notes) if part in archive.names]
        pages.append("\n".join(_words(archive.text(part), options) for part in parts))
    return archive.content(pages, is_paged=True)


def read_xlsx(data: bytes, options: ReadOptions) -> Content:
    """A row a line, sheet by sheet."""
    archive = _Archive(data, options)
    strings: list[str] = []
    if "xl/sharedStrings.xml" in archive.names:
        items = UNREAD.sub("", archive.text("xl/sharedStrings.xml")).split("</si>")
        strings = [" ".join(TAG.sub("", item).split()) for item in items]

    def value(cell: re.Match[str]) -> str:
        """The cell with its shared string for the string's number."""
        if 't="s"' not in cell[1]:
            return cell[0]
        string = ""
        if cell[2].isdecimal() and int(cell[2]) < len(strings):
            string = strings[int(cell[2])]
        return cell[1] + string

    sheets = archive.numbered(r"xl/worksheets/sheet\d+\.xml")
    return archive.content(
        [_words(CELL.sub(value, archive.text(name)), options) for name in sheets]
    )


def read_epub(data: bytes, options: ReadOptions) -> Content:
    """The chapters of a book in the order of its spine."""
    archive = _Archive(data, options)
    package = next((name for name in archive.names if name.endswith(".opf")), "")
    files: dict[str, str] = {}
    texts: list[str] = []
    for item in ITEM.finditer(archive.text(package)):
        attributes = dict(ATTRIBUTE.findall(item[2]))
        # An `item` of the manifest names a file, an `itemref` of the spine its place in the book
        if not item[1]:
            files[attributes.get("id", "")] = unquote(html.unescape(attributes.get("href", "")))
            continue
        path = posixpath.join(
            posixpath.dirname(package), files.get(attributes.get("idref", ""), "")
        )
        if posixpath.normpath(path) in archive.names:
            page = archive.text(posixpath.normpath(path))
            texts.append(read_html(f"\ufeff{page}".encode(), options).pages[0])
    return archive.content(texts, package)


def read_xml(data: bytes, options: ReadOptions) -> Content:
    """The texts of all elements, in the lines of the file."""
    text, notes = decoded_markup(data)
    text = TAG.sub(" ", text.replace("<![CDATA[", "").replace("]]>", ""))
    page = read_html(f"\ufeff<pre>{text}</pre>".encode(), options).pages[0]
    lines = (" ".join(line.split()) for line in page.split("\n"))
    return Content(None, ["\n".join(line for line in lines if line)], notes)
