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
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
STYLES = ("word/styles.xml", "styles.xml", "content.xml")
FURTHER = re.compile(
    r"(word/(header|footer|footnotes|endnotes|comments)\d*|"
    r"(word|ppt|xl)/(diagrams/data|charts/chart)\d*|"
    r"xl/(drawings/drawing|threadedComments/threadedComment|comments/comment|comments)\d*)\.xml"
)
# Elements of OpenDocument that stand beside the text
BESIDE = {
    "content.xml": re.compile("annotation|custom-shape|text-box|(header|footer)(-left|-first)?"),
    "styles.xml": re.compile("(header|footer)(-left|-first)?"),
}
# What is rewritten, if a part has it
REWRITTEN = re.compile(
    rb"superscript|baseline=|vanish|noBreakHyphen|[:<]ruby|annotation|[:<]sym |display=.none|"
    rb"text-position=.(super|[1-9])"
)
# The letters of the font Symbol, whose numbers begin at F020, and those that no font here names
SYMBOL = " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾"
SYMBOL += "αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼" + " " * 33 + "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…"
UNNAMED = re.compile("[\ue000-\uf8ff]")
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
# What becomes what in these parts: an end behind each slide, what one of two programs shows, no
# sheet hidden, nor a row that a filter hides, line ends of cells, and currencies as literals
REPLACED: tuple[tuple[str, bytes, bytes | Callable[[re.Match[bytes]], bytes]], ...] = (
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
    (
        r"ppt/slides/[^/]*\.xml",
        rb"(?s)<mc:Fallback\b(?:[^<>]*/>|.*?</mc:Fallback>)|\bmc:(?:AlternateContent|Choice)\b",
        lambda part: b"p:grpSp" * part[0].startswith(b"mc"),
    ),
    ("xl/workbook.xml", rb' state="\w*[hH]idden"', b""),
    (r"xl/(?:sharedStrings|worksheets/[^/]*)\.xml", rb"_x000[aAdD]_", b"&#10;"),
    (r"xl/(?:sharedStrings|worksheets/[^/]*)\.xml", rb"_x005[fF]_", b"_"),
    (
        r"xl/styles\.xml",
        rb"(&quot;.*?&quot;|\[[^\]]*\]|\\.)|(\xc2[\xa2-\xa5]|\xe2\x82[\xa0-\xbf])",
        lambda sign: sign[1] or b"&quot;%b&quot;" % sign[2],
    ),
    (
        r"xl/worksheets/[^/]*\.xml",
        rb'(<(?:\w+:)?(?:row|col)\b[^<>]*?) hidden="(?:1|true)"',
        rb"\1",
    ),
    ("content.xml", rb"</\w+:page>", rb"\g<0>" + END_PAGE.encode()),
    # Shapes within a line, and fields that have no value yet
    (
        "content.xml",
        rb"(?=</\w+:(?:title|desc)>|</\w+:p>\s*(?:</\w+:text-box>|<\w+:enhanced-geometry))",
        b" ",
    ),
    ("content.xml", rb">(?:&lt;number&gt;|\?\?\?)<", b"><"),
    # Deleted words of RTF, its comments as notes, what stands above and below, and exponents
    ("rtf", rb"\{[^{}]*\\deleted\b[^{}]*\}", b"{}"),
    ("rtf", rb"\{\\\*\\annotation\b", rb"{\\footnote"),
    ("rtf", rb"\{\\(?:header|footer)[lrf]?\b", rb"{\\pard"),
    (
        "rtf",
        rb"(\{(?=[^{}]*\\(?:super\b|up[1-9]))(?:\\[a-z]++-?+\d*+\s?+)++)(?=[-\d])",
        rb"\1^",
    ),
)
HIDDEN_IN_RTF = re.compile(rb"\{(?!\\\*|\\s\d)[^{}]*\\v(?![a-z\d-])[^{}]*\}")
# The regions of changes that a flat file keeps in the text
DELETED = re.compile(rb"<[\w:]*changed-region\b[^<>]*?\bid=\"([^\"]+)\"[^<>]*>\s*<[\w:]*deletion\b")
# Records of old workbooks: how they begin, those that say what is hidden (where, and which bits),
# and texts beside the cells
BOOK = b"\x09\x08\x10\x00\x00\x06"
HIDDEN_IN_BOOK = {0x85: (4, 3), 0x7D: (8, 1), 0x208: (12, 0x20)}
TEXT_OBJECT = 0x1B6
# What a document of Word says of its lengths
WORD = re.compile(rb"\xec\xa5[\xc1\x01][\0\1][\0-\xff]{80}([\0-\xff]{24})")
HIDDEN = "hidden runs of words"
LACKS = {
    "doc": "deleted and hidden words and exponents are read as plain text",
    "ppt": "words of charts, comments and descriptions of pictures are not read",
}
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
    lacks: Counter[str] = Counter()
    if kind == "rtf":
        data, lacks[HIDDEN] = HIDDEN_IN_RTF.subn(b"{}", _replaced(kind, data))
    elif kind == "xlsx" and not parts:
        data, lacks["charts and text boxes"] = _opened(data)
    styles = _styles(parts)
    shown = {name: _shown(name, part, styles, lacks) for name, part in parts.items()}
    if shown != parts:
        data = _packed({**shown, "ppt/end.xml": END_SLIDE.encode()})
    text = _within(_document(anydoc.to_document(data, kind)), options)
    text, lacks["signs of fonts that do not say which they are"] = UNNAMED.subn("", text)
    pages = text.split(PAGE_END)
    pages[-1] = "\n\n".join([pages[-1], *_missing(parts, text)])
    notes = [f"{count} {what} were left out" for what, count in lacks.items() if count]
    return Content(title, pages, notes + _notes(parts, kind, data), is_paged=len(pages) > 1)


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


def _replaced(name: str, data: bytes) -> bytes:
    for part, pattern, replacement in REPLACED:
        if re.fullmatch(part, name):
            data = re.sub(pattern, replacement, data)
    return data


def _opened(data: bytes) -> tuple[bytes, int]:
    """(an old workbook in which nothing is hidden, its charts and text boxes)."""
    book = bytearray(data)
    place, lacking = data.find(BOOK), 0
    while 0 <= place < len(data) - 20:
        kind, length = struct.unpack_from("<HH", data, place)
        where, bits = HIDDEN_IN_BOOK.get(kind, (0, 0))
        book[place + 4 + where] &= ~bits & 0xFF
        lacking += kind == TEXT_OBJECT or data.startswith(BOOK + b"\x20", place)
        place += 4 + length
    return bytes(book), lacking


def _styles(parts: Mapping[str, bytes]) -> dict[str, set[str]]:
    """The styles that hide words, and those that raise them."""
    styles: dict[str, set[str]] = {"hidden": set(), "raised": set()}
    for part in STYLES:
        if REWRITTEN.search(parts.get(part, b"")):
            for style in _every(fromstring(parts[part]), "style"):
                name = _attribute(style, "styleId") or _attribute(style, "name")
                if _is_hidden(style):
                    styles["hidden"].add(name)
                if _is_raised(style):
                    styles["raised"].add(name)
    return styles


def _shown(name: str, data: bytes, styles: Mapping[str, set[str]], lacks: Counter[str]) -> bytes:
    """The part as the library gets it."""
    data = _replaced(name, data)
    changes = b"|".join(map(re.escape, DELETED.findall(data)))
    if changes:
        span = rb"(?s)change-start\b[^<>]*\"(%b)\".*?change-end\b[^<>]*\"\1\"" % changes
        data = re.sub(span, lambda part: re.sub(rb">[^<>]+<", b"><", part[0]), data)
    words = [style.encode() for style in styles["hidden"] | styles["raised"]]
    is_rewritten = REWRITTEN.search(data) or any(word in data for word in words)
    if SHOWN.fullmatch(name) is None or not is_rewritten:
        return data
    root = fromstring(data)
    lacks[HIDDEN] += _rewrite(root, styles)
    return tostring(root)


def _rewrite(root: Element, styles: Mapping[str, set[str]]) -> int:
    """Take hidden words out of the text, mark exponents, and write signs as characters. Returns how
    many runs were hidden."""
    hidden = 0
    names = ("annotation", "noBreakHyphen", "r", "ruby", "ruby-text", "span", "sym")
    for node in list(_every(root, *names)):
        space, _, name = str(node.tag).rpartition("}")
        bases = [
            words.text or "" for base in _every(node, "rubyBase") for words in _every(base, "t")
        ]
        used = {_attribute(style, "val") for style in _every(node, "rStyle")}
        used.add(_attribute(node, "style-name"))
        is_run = name in ("r", "span")
        if name == "noBreakHyphen" or (name == "ruby" and bases):
            _become(node, "".join(bases) or "-")
            node.tag = f"{space}}}t"
        elif name == "sym" and _attribute(node, "char"):
            _become(node, _sign(node))
            node.tag = f"{space}}}t"
        elif name in ("annotation", "ruby-text"):
            _become(node, "")
        elif is_run and (_is_hidden(node) or used & styles["hidden"]):
            hidden += 1
            _become(node, "")
        elif is_run and (_is_raised(node) or used & styles["raised"]):
            for words in [node, *_every(node, "t")]:
                _raise(words)
    return hidden


def _sign(node: Element) -> str:
    """The character of a sign, as far as its font is known."""
    number = int(_attribute(node, "char"), 16)
    place = number - 0xF020
    if _attribute(node, "font") == "Symbol" and 0 <= place < len(SYMBOL):
        return SYMBOL[place]
    return chr(number)


def _become(node: Element, text: str) -> None:
    """Replace all that an element holds."""
    node[:], node.text = [], text


def _raise(words: Element) -> None:
    """Set an exponent apart by ^."""
    if EXPONENT.match(words.text or ""):
        words.text = f"^{words.text}"


def _is_hidden(run: Element) -> bool:
    marks = (_attribute(mark, "val") for mark in _every(run, "vanish"))
    properties = (_attribute(words, "display") for words in _every(run, "text-properties"))
    return any(value not in ("0", "false", "off") for value in marks) or "none" in properties


def _is_raised(run: Element) -> bool:
    positions = [_attribute(mark, "val") for mark in _every(run, "vertAlign")]
    positions += [_attribute(mark, "baseline") for mark in _every(run, "rPr")]
    positions += [_attribute(words, "text-position") for words in _every(run, "text-properties")]
    return any(re.match("super|[1-9]", position) for position in positions)


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
    flat = " ".join(MARKS_OF_LINES.sub("", text).replace("^", "").split())
    for name in sorted(parts):
        lines: list[str] = []
        if FURTHER.fullmatch(name):
            for paragraph in _every(fromstring(parts[name]), "p", "text"):
                words = (
                    part.text if str(part.tag).endswith("}t") else " "
                    for part in _every(paragraph, "t", "tab", "br")
                )
                lines.append("".join(filter(None, words)) or paragraph.text or "")
        elif name in BESIDE:
            for holder in fromstring(parts[name]).iter():
                if BESIDE[name].fullmatch(str(holder.tag).rpartition("}")[2]):
                    lines += ["".join(words.itertext()) for words in _every(holder, "p")]
        lines = [" ".join(line.split()) for line in lines]
        lines = [line for line in dict.fromkeys(lines) if line and line not in flat]
        if lines:
            yield "\n".join(lines)


def _notes(parts: Mapping[str, bytes], kind: str, data: bytes) -> list[str]:
    """What is not there, or perhaps should not be."""
    notes: list[str] = []
    empty = sum(len(NO_VALUE.findall(parts[name])) for name in parts if "/worksheets/" in name)
    if empty:
        notes.append(f"{empty} formulas have no stored value")
    objects = sum(re.fullmatch(r"Object [^/]*/content\.xml", name) is not None for name in parts)
    if objects:
        notes.append(f"{objects} embedded objects, such as formulas and charts, were not read")
    if kind in LACKS:
        notes.append(f"in {kind}, {LACKS[kind]}")
    for lengths in WORD.findall(data)[: kind == "doc"]:
        beside = sum(struct.unpack("<I4xI4x2I", lengths))
        if beside:
            notes.append(f"{beside} characters of headers, comments and text boxes were not read")
    return notes
