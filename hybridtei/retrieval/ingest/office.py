"""Documents, sheets and slides by the library anydoc: Microsoft Office, OpenDocument and RTF; and
books of EPUB.

The library gets what the author shows: readings of characters, hidden words and comments are taken
out of the text before, and an exponent has its ^. Parts that it does not read (headers, comments,
diagrams) are added behind, if its text lacks their words.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element, fromstring, tostring

from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import (
    HEADING_MARK,
    MARKS_OF_LINES,
    TABLE_END,
    TABLE_MARK,
    Content,
    Unfit,
)
from hybridtei.system.machine import require_extra

# The parts that are read here may be larger than the archive only by this factor
MAX_UNFOLDED, MAX_RATIO = 10_000_000, 100
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
READ = re.compile(r"mimetype|.*\.(xml|rels|opf|x?html?)")
TITLE = re.compile(r"docProps/core\.xml|meta\.xml|.*\.opf")
# Parts whose words the library shows, and parts that it may leave out
SHOWN = re.compile(r"word/\w+\.xml|ppt/slides/\w+\.xml|xl/sharedStrings\.xml|content\.xml")
FURTHER = re.compile(
    r"(word/(header|footer|footnotes|endnotes|comments)\d*|"
    r"(word|ppt|xl)/(diagrams/data|charts/chart)\d*|"
    r"xl/(drawings/drawing|threadedComments/threadedComment|comments/comment|comments)\d*)\.xml"
)
# What is rewritten, if a part has it
REWRITTEN = re.compile(
    rb"superscript|baseline=|vanish|noBreakHyphen|[:<]ruby|annotation|text-position=.(super|[1-9])"
)
EXPONENT = re.compile(r"[-+\u2212]?\d")
# Between slides: one with nothing but this
PAGE_END = "\ufdd3"
OFFICE = "http://schemas.openxmlformats.org"
END_SLIDE = (
    f'<p:sld xmlns:p="{OFFICE}/presentationml/2006/main" xmlns:a="{OFFICE}/drawingml/2006/main">'
    "<p:cSld><p:spTree><p:sp><p:txBody><a:p><a:r>"
    f"<a:t>{PAGE_END}</a:t></a:r></a:p></p:txBody></p:sp></p:spTree></p:cSld></p:sld>"
)
END_RELATION = (
    f'<Relationship xmlns="{OFFICE}/package/2006/relationships" Id="end" Target="end.xml" '
    f'Type="{OFFICE}/officeDocument/2006/relationships/slide"/>'
)
OPENDOCUMENT = "urn:oasis:names:tc:opendocument:xmlns"
END_PAGE = (
    f'<d:page xmlns:d="{OPENDOCUMENT}:drawing:1.0" xmlns:t="{OPENDOCUMENT}:text:1.0"><d:frame>'
    f"<d:text-box><t:p>{PAGE_END}</t:p></d:text-box></d:frame></d:page>"
)
# What becomes what in these parts: an end behind each slide, and no sheet hidden, nor a row that a
# filter hides
REPLACED = (
    (
        "ppt/presentation.xml",
        rb'(<(?:\w+:)?sldId\b[^<>]*:id=")[^"]*("[^<>]*/>)',
        rb"\g<0>\1end\2",
    ),
    (
        "ppt/_rels/presentation.xml.rels",
        rb"</(?:\w+:)?Relationships>",
        END_RELATION.encode() + rb"\g<0>",
    ),
    ("xl/workbook.xml", rb' state="\w*[hH]idden"', b""),
    (
        r"xl/worksheets/[^/]*\.xml",
        rb'(<(?:\w+:)?(?:row|col)\b[^<>]*?) hidden="(?:1|true)"',
        rb"\1",
    ),
    ("content.xml", rb"</\w+:page>", rb"\g<0>" + END_PAGE.encode()),
)
NO_VALUE = re.compile(
    rb"(?:</(?:\w+:)?f>|<(?:\w+:)?f\b[^<>]*/>)\s*(?:<(?:\w+:)?v\s*/>|<(?:\w+:)?v></(?:\w+:)?v>)?\s*"
    rb"</(?:\w+:)?c>"
)
# A cell of more characters is not repeated in the rows that it spans
MAX_COVERED = 100


def read_office(data: bytes, options: ReadOptions) -> Content:
    """The text, with what stands above and below it; a page a slide."""
    require_extra("qdrant", "anydoc")
    import anydoc

    parts: dict[str, bytes] = {}
    if data.startswith(b"PK"):
        parts = _parts(data)
    elif data.lstrip().startswith(b"<"):
        parts = _archived(data)
        data = _packed(parts)
    kind = anydoc.format_from_bytes(data)
    if kind is None and "EncryptedPackage".encode("utf-16-le") in data:
        raise Unfit("is encrypted")
    if kind is None:
        raise Unfit("no reader for what is in this archive")
    titles = (
        title.text
        for name in parts
        if TITLE.fullmatch(name)
        for title in _every(fromstring(parts[name]), "title")
    )
    title = next(titles, None)
    if kind == "epub":
        return Content(title, _chapters(parts, options))
    shown = {name: _shown(name, part) for name, part in parts.items()}
    if shown != parts:
        data = _packed({**shown, "ppt/end.xml": END_SLIDE.encode()})
    text = _within(_document(anydoc.to_document(data, kind)), options)
    pages = text.split(PAGE_END)
    pages[-1] = "\n\n".join([pages[-1], *_missing(parts, text)])
    return Content(title, pages, _notes(parts, kind), is_paged=len(pages) > 1)


def _parts(data: bytes) -> dict[str, bytes]:
    """The parts of an archive that are read here. Raises Unfit if they unfold too far."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [member for member in archive.infolist() if READ.fullmatch(member.filename)]
        # Other methods unfold a part whole, also beyond the size that the archive states
        if any(member.compress_type not in METHODS for member in members):
            raise Unfit("its parts are packed by a method that is not read")
        size = sum(member.file_size for member in members)
        if size > max(MAX_UNFOLDED, MAX_RATIO * len(data)):
            raise Unfit(f"{len(data)} bytes would become {size} bytes")
        return {member.filename: archive.read(member) for member in members}


def _archived(data: bytes) -> dict[str, bytes]:
    """The parts that one file of OpenDocument would have in an archive."""
    root = fromstring(data)
    root.tag += "-content"
    kind = _attribute(root, "mimetype") or "application/vnd.oasis.opendocument.text"
    parts = {"mimetype": kind.encode(), "content.xml": tostring(root)}
    for described in list(_every(root, "meta"))[:1]:
        parts["meta.xml"] = tostring(described)
    return parts


def _chapters(parts: Mapping[str, bytes], options: ReadOptions) -> list[str]:
    """The chapters of a book in the order of its spine, each once. The library leaves out those
    that are no XML."""
    name = next(part for part in parts if part.endswith(".opf"))
    package = fromstring(parts[name])
    files: dict[str, str] = {}
    for item in _every(package, "item"):
        path = posixpath.join(posixpath.dirname(name), unquote(_attribute(item, "href")))
        files[_attribute(item, "id")] = posixpath.normpath(path)
    order = dict.fromkeys(
        files.get(_attribute(item, "idref"), "") for item in _every(package, "itemref")
    )
    return [read_html(parts[path], options).pages[0] for path in order if path in parts]


def _packed(parts: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return data.getvalue()


def _attribute(element: Element, name: str) -> str:
    """The value of an attribute in any namespace, or nothing."""
    values = [value for key, value in element.attrib.items() if key.rpartition("}")[2] == name]
    return "".join(values[:1])


def _every(element: Element, *names: str) -> Iterator[Element]:
    """The elements of these local names, in order."""
    return (below for below in element.iter() if str(below.tag).rpartition("}")[2] in names)


def _shown(name: str, data: bytes) -> bytes:
    """The part as the library gets it."""
    for part, pattern, replacement in REPLACED:
        if re.fullmatch(part, name):
            data = re.sub(pattern, replacement, data)
    if SHOWN.fullmatch(name) is None or REWRITTEN.search(data) is None:
        return data
    root = fromstring(data)
    _rewrite(root)
    return tostring(root)


def _rewrite(root: Element) -> None:
    """Take hidden words out of the text, and mark exponents."""
    raised = {
        _attribute(style, "name")
        for style in _every(root, "style")
        for words in _every(style, "text-properties")
        if re.match("super|[1-9]", _attribute(words, "text-position"))
    }
    names = ("annotation", "noBreakHyphen", "r", "ruby", "ruby-text", "span")
    for node in list(_every(root, *names)):
        space, _, name = str(node.tag).rpartition("}")
        bases = [
            words.text or "" for base in _every(node, "rubyBase") for words in _every(base, "t")
        ]
        if name == "noBreakHyphen" or (name == "ruby" and bases):
            _become(node, "".join(bases) or "-")
            node.tag = f"{space}}}t"
        elif name in ("annotation", "ruby-text") or (name == "r" and _is_hidden(node)):
            _become(node, "")
        elif name == "span" and _attribute(node, "style-name") in raised:
            _raise(node)
        elif name == "r" and _is_raised(node):
            for words in _every(node, "t"):
                _raise(words)


def _become(node: Element, text: str) -> None:
    """Replace all that an element holds."""
    node[:], node.text = [], text


def _raise(words: Element) -> None:
    """Set an exponent apart by ^."""
    if EXPONENT.match(words.text or ""):
        words.text = f"^{words.text}"


def _is_hidden(run: Element) -> bool:
    marks = (_attribute(mark, "val") for mark in _every(run, "vanish"))
    return any(value not in ("0", "false", "off") for value in marks)


def _is_raised(run: Element) -> bool:
    positions = (_attribute(mark, "val") for mark in _every(run, "vertAlign"))
    shifts = (_attribute(mark, "baseline") for mark in _every(run, "rPr"))
    return "superscript" in positions or any(
        shift[:1].isdigit() and shift != "0" for shift in shifts
    )


def _within(lines: Iterator[str], options: ReadOptions) -> str:
    """The lines as one text. Raises Unfit as soon as it is too long."""
    written: list[str] = []
    room = options.max_document_characters
    for line in lines:
        written.append(line)
        room -= len(line)
        if room < 0:
            raise Unfit("the text is longer than allowed: see --max-document-characters")
    return "\n".join(written)


def _document(document: Any) -> Iterator[str]:
    """The lines of a document, its notes behind."""
    notes = {note.id: number for number, note in enumerate(document.notes, 1)}
    yield from _lines(document.blocks, notes)
    for note in document.notes:
        yield f"[{notes[note.id]}] {' '.join(_lines(note.blocks, notes))}"


def _lines(blocks: Sequence[Any], notes: Mapping[str, int]) -> Iterator[str]:
    """The lines of these blocks. `notes`: the number of each note."""
    for block in blocks:
        if block.table is not None:
            yield from _rows(block.table, notes)
        elif block.list is not None:
            for item in block.list.items:
                yield from _lines(item.blocks, notes)
        elif block.blocks is not None:
            yield from _lines(block.blocks, notes)
        else:
            words = (block.text or _words(block.content or (), notes)).strip()
            if words and block.level:
                words = f"{HEADING_MARK}{block.level}{words}"
            if words:
                yield words


def _words(content: Sequence[Any], notes: Mapping[str, int]) -> str:
    written: list[str] = []
    for part in content:
        if part.kind == "note_ref":
            written.append(f"[{notes.get(part.note_id, '')}]")
        elif part.kind == "line_break":
            written.append("\n")
        else:
            written.append(part.text or part.alt or _words(part.content or (), notes))
    return MARKS_OF_LINES.sub("", "".join(written))


def _rows(table: Any, notes: Mapping[str, int]) -> Iterator[str]:
    """A line a row; of a layout, the lines of its cells."""
    header = table.header_rows
    texts: list[list[str]] = []
    for number, row in enumerate(table.grid, 1):
        cells: list[str] = []
        for column, slot in enumerate(row):
            text = ""
            if slot.cell is not None:
                text = "\n".join(_lines(slot.cell.blocks, notes))
            elif slot.origin_col == column and slot.origin_row < len(texts):
                text = texts[slot.origin_row][column]
            cells.append(text)
        texts.append([cell if len(cell) <= MAX_COVERED else "" for cell in cells])
        line = " | ".join(" ".join(cell.split()) for cell in cells).rstrip(" |")
        if table.kind == "layout":
            line = "\n".join(filter(None, cells))
        if line and number == header:
            line = TABLE_MARK + line
        if line:
            yield line
    if header:
        yield TABLE_END


def _missing(parts: Mapping[str, bytes], text: str) -> Iterator[str]:
    """The paragraphs of further parts whose words the text lacks, a part each."""
    flat = " ".join(MARKS_OF_LINES.sub("", text).split())
    for name in sorted(parts):
        lines: list[str] = []
        if FURTHER.fullmatch(name):
            for paragraph in _every(fromstring(parts[name]), "p", "text"):
                words = (
                    part.text if str(part.tag).endswith("}t") else " "
                    for part in _every(paragraph, "t", "tab", "br")
                )
                lines.append("".join(filter(None, words)) or paragraph.text or "")
        elif name in ("content.xml", "styles.xml"):
            for holder in _every(fromstring(parts[name]), "annotation", "header", "footer"):
                lines += ["".join(words.itertext()) for words in _every(holder, "p")]
        lines = [" ".join(line.split()) for line in lines]
        lines = [line for line in dict.fromkeys(lines) if line and line not in flat]
        if lines:
            yield "\n".join(lines)


def _notes(parts: Mapping[str, bytes], kind: str) -> list[str]:
    """What is not there, or perhaps should not be."""
    notes: list[str] = []
    words = parts.get("word/document.xml", b"")
    hidden = 0
    if b"vanish" in words:
        hidden = sum(map(_is_hidden, _every(fromstring(words), "r")))
    if hidden:
        notes.append(f"{hidden} hidden runs of words were left out")
    empty = sum(len(NO_VALUE.findall(parts[name])) for name in parts if "/worksheets/" in name)
    if empty:
        notes.append(f"{empty} formulas have no stored value")
    objects = sum(re.fullmatch(r"Object [^/]*/content\.xml", name) is not None for name in parts)
    if objects:
        notes.append(f"{objects} embedded objects, such as formulas and charts, were not read")
    if kind in ("doc", "rtf"):
        notes.append(f"in {kind}, deleted and hidden words and exponents are read as plain text")
    return notes
