"""Documents, sheets and slides of Microsoft Office, by the library office-oxide, whose HTML is then
read; and books of EPUB.

The library gets an archive that is written here, of checked parts of XML. What it does not read is
rewritten before (formulas, readings of characters, times of day) or added behind (notes of slides,
diagrams, headers), if its text lacks the words.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Literal
from urllib.parse import unquote
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from hybridtei.retrieval.ingest.archive import (
    OLE,
    Archive,
    attribute,
    every,
    local,
    number_of,
    packed,
    related,
    title_of,
    tree_of,
)
from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import MARKS_OF_LINES, Content, Unfit
from hybridtei.system.machine import require_extra

MAX_ROWS = 100_000
# HTML is this many times as long as its text at most
MARKUP_FACTOR = 10
# Names of streams in the older formats, in UTF-16
Kind = Literal["docx", "xlsx", "pptx", "doc", "xls", "ppt"]
STREAMS: dict[str, Kind] = {
    "WordDocument": "doc",
    "Workbook": "xls",
    "Book": "xls",
    "PowerPoint Document": "ppt",
}
# In what is written here, before it is known
PREFIX = "\0"
SLIDE_END = "<hr />"
# Parts with words that the library may leave out
FURTHER = re.compile(
    r"(word/(header|footer|footnotes|endnotes|comments)\d*|"
    r"(word|ppt|xl)/(diagrams/data|charts/chart)\d*|ppt/notesSlides/notesSlide\d+|"
    r"xl/drawings/drawing\d+)\.xml"
)
MAX_FURTHER = 2_000
# Of a slide's notes: its picture, number, date
NO_NOTES = ("sldImg", "sldNum", "dt", "hdr", "ftr")
# Usual places of parts that a document names no relationship for
USUAL = {
    "styles": "styles.xml",
    "numbering": "numbering.xml",
    "footnotes": "footnotes.xml",
    "endnotes": "endnotes.xml",
}
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
# Built-in formats of times of day, and of durations
TIME_FORMATS = {18, 19, 20, 21, 45, 46, 47}
# A cell's number of a shared text
SHARED = re.compile(rb't="s"[^<>]*>\s*<(?:\w+:)?v>(\d{1,9})<')
# A formula's elements by their operands
OPERANDS = ("num", "den", "e", "sup", "sub", "deg")
FORMULAS = {
    "f": "{num}/{den}",
    "sSup": "{e}^{sup}",
    "sSub": "{e}_{sub}",
    "sSubSup": "{e}_{sub}^{sup}",
    "rad": "{deg}√{e}",
    "nary": "{sign}_{sub}^{sup} {e}",
    "d": "({e})",
}
NO_VALUE = re.compile(
    rb"(?:</(?:\w+:)?f>|<(?:\w+:)?f\b[^<>]*/>)\s*(?:<(?:\w+:)?v\s*/>|<(?:\w+:)?v></(?:\w+:)?v>)?\s*"
    rb"</(?:\w+:)?c>"
)


def read_docx(data: bytes, options: ReadOptions) -> Content:
    """The document, its notes and comments, and what stands above and below its pages."""
    parts = _parts(data)
    for name in [name for name in parts if re.fullmatch(r"word/document\d*\.xml", name)]:
        _relate(parts, name)
        rules = {"oMathPara": _formula, "oMath": _formula, "ruby": _base, "sym": _symbol}
        parts[name] = _rewritten(parts[name], rules)
    text = _text(_html(parts, "docx", options), options)
    added = _missing(parts, text)
    return Content(title_of(parts, "docProps/core.xml"), [text, *added])


def read_pptx(data: bytes, options: ReadOptions) -> Content:
    """A page a slide, with its notes and the words of its diagrams."""
    parts = _parts(data)
    pages = [_text(page, options) for page in _html(parts, "pptx", options).split(SLIDE_END)]
    show = "ppt/presentation.xml"
    places = related(parts, show)
    slides = []
    if show in parts:
        order = every(tree_of(parts[show], show), "sldId")
        slides = [places.get(_relation(slide), "") for slide in order]
    rest = dict(parts)
    if len(slides) == len(pages):
        for place, name in enumerate(slides):
            own = {part: rest.pop(part) for part in related(parts, name).values() if part in rest}
            pages[place] = "\n".join([pages[place], *_missing(own, pages[place])])
    pages += _missing(rest, "\n".join(pages))
    return Content(title_of(parts, "docProps/core.xml"), pages, is_paged=True)


def read_xlsx(data: bytes, options: ReadOptions) -> Content:
    """A row a line, sheet by sheet."""
    parts = _parts(data)
    sheets = [name for name in parts if re.match(r"xl/worksheets/[^/]+\.xml$", name)]
    _check_sheets(parts, sheets, options)
    times = _time_styles(parts)
    if times:
        for name in sheets:
            parts[name] = _rewritten(parts[name], {"c": lambda cell: _time(cell, times)})
    empty = sum(len(NO_VALUE.findall(parts[name])) for name in sheets)
    text = _text(_html(parts, "xlsx", options), options)
    notes = [f"{empty} formulas have no stored value"] * bool(empty)
    return Content(title_of(parts, "docProps/core.xml"), [text, *_missing(parts, text)], notes)


def read_epub(data: bytes, options: ReadOptions) -> Content:
    """The chapters of a book in the order of its spine, each once."""
    archive = Archive(data)
    name = next((file for file in archive.names if file.endswith(".opf")), "")
    package = tree_of(archive.read(name), name)
    files: dict[str, str] = {}
    for item in every(package, "item"):
        path = posixpath.join(posixpath.dirname(name), unquote(attribute(item, "href")))
        files[attribute(item, "id")] = posixpath.normpath(path)
    order = dict.fromkeys(
        files.get(attribute(item, "idref"), "") for item in every(package, "itemref")
    )
    texts: list[str] = []
    room = options.max_document_characters
    for path in order:
        if path in archive.names:
            texts.append(read_html(archive.read(path), options).pages[0])
            room -= len(texts[-1])
            if room < 0:
                raise Unfit("the book's text is longer than allowed: --max-document-characters")
    titles = [part.text for part in every(package, "title")]
    return Content(next(iter(titles), None), texts)


def read_older(data: bytes, options: ReadOptions) -> Content:
    """A document, sheet or slides of Office 97 to 2003."""
    for stream, kind in STREAMS.items():
        if stream.encode("utf-16-le") in data:
            page = _by_library(data, kind, options)
            pages = [_text(part, options) for part in page.split(SLIDE_END)]
            return Content(None, pages, is_paged=kind == "ppt")
    raise Unfit("is encrypted, or has an older format that has no reader")


def _parts(data: bytes) -> dict[str, bytes]:
    if data.startswith(OLE):
        raise Unfit("is encrypted, or has an older format than its name says")
    return Archive(data).xml()


def _html(parts: dict[str, bytes], kind: Kind, options: ReadOptions) -> str:
    return _by_library(packed(parts), kind, options)


def _by_library(data: bytes, kind: Kind, options: ReadOptions) -> str:
    """The document as HTML. Raises Unfit."""
    require_extra("qdrant", "office_oxide")
    import office_oxide

    try:
        with office_oxide.Document.from_bytes(data, kind) as document:
            page: str = document.to_html()
    except (office_oxide.OfficeOxideError, ValueError) as error:
        raise Unfit(f"not readable as {kind}: {error}"[:300]) from None
    if len(page) > MARKUP_FACTOR * options.max_document_characters:
        raise Unfit(f"unfolds to {len(page)} characters of HTML")
    return page


def _text(page: str, options: ReadOptions) -> str:
    # The foot of a page is text of the document; a page of the web has it for links
    page = page.replace("<footer>", "<div>").replace("</footer>", "</div>")
    return read_html(f"\ufeff<body>{page}".encode(), options).pages[0]


def _relation(element: Element) -> str:
    """The id of an element's relationship, which has the same local name as its own id."""
    values = [value for key, value in element.attrib.items() if key.endswith("}id")]
    return "".join(values[:1])


def _relate(parts: dict[str, bytes], name: str) -> None:
    """Give a document without relationships those to parts in their usual places."""
    folder, _, file = name.rpartition("/")
    place = f"{folder}/_rels/{file}.rels"
    if place not in parts:
        relations = "".join(
            f'<Relationship Id="{kind}" Type="{RELATIONS}/{kind}" Target="{target}"/>'
            for kind, target in USUAL.items()
            if f"{folder}/{target}" in parts
        )
        scheme = "http://schemas.openxmlformats.org/package/2006/relationships"
        parts[place] = f'<Relationships xmlns="{scheme}">{relations}</Relationships>'.encode()


def _missing(parts: dict[str, bytes], text: str) -> list[str]:
    """The paragraphs of further parts whose words the text lacks, a part each."""
    flat = " ".join(MARKS_OF_LINES.sub("", text).split())
    added: list[str] = []
    for name in sorted(parts, key=number_of):
        if not FURTHER.fullmatch(name):
            continue
        root = tree_of(parts[name], name)
        lines = [" ".join(line.split()) for line in _paragraphs(root)][:MAX_FURTHER]
        lines = [line for line in lines if line and line not in flat]
        if lines:
            added.append("\n".join(dict.fromkeys(lines)))
    return added


def _paragraphs(root: Element) -> list[str]:
    """The words of each paragraph."""
    for shape in list(every(root, "spTree", "grpSp")):
        for child in list(shape):
            if any(attribute(holder, "type") in NO_NOTES for holder in every(child, "ph")):
                shape.remove(child)
    return [
        "".join(
            words.text or "" if local(words) == "t" else " "
            for words in every(paragraph, "t", "tab", "br")
        )
        for paragraph in every(root, "p")
    ]


def _rewritten(data: bytes, rules: Mapping[str, Callable[[Element], str | None]]) -> bytes:
    """The XML with these elements replaced by what the rules write, or as they are for None."""
    if not any(f":{name}".encode() in data or f"<{name}".encode() in data for name in rules):
        return data
    parser = expat.ParserCreate()
    parser.buffer_text = True
    # The parts between replaced elements, and where the last one ended
    pieces: list[bytes] = []
    state = {"end": 0, "start": 0, "depth": 0}
    builder = TreeBuilder()
    prefix = ""

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal prefix, builder
        # The root's prefix is that of all elements here
        prefix = prefix or (name.rpartition(":")[0] + ":").lstrip(":") or "-"
        if state["depth"] or name.rpartition(":")[2] in rules:
            if not state["depth"]:
                state["start"] = parser.CurrentByteIndex
                builder = TreeBuilder()
            state["depth"] += 1
            builder.start(name.rpartition(":")[2], attributes)

    def end(name: str) -> None:
        if not state["depth"]:
            return
        state["depth"] -= 1
        builder.end(name.rpartition(":")[2])
        if state["depth"]:
            return
        element = builder.close()
        written = rules[element.tag](element)
        if written is not None:
            stop = data.index(b">", parser.CurrentByteIndex) + 1
            pieces.append(data[state["end"] : state["start"]])
            pieces.append(written.replace(PREFIX, prefix.strip("-")).encode())
            state["end"] = stop

    def words(text: str) -> None:
        if state["depth"]:
            builder.data(text)

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = words
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        raise Unfit(f"not readable as XML: {error}") from None
    return b"".join([*pieces, data[state["end"] :]])


def _run(text: str) -> str:
    return f'<{PREFIX}t xml:space="preserve">{escape(text)}</{PREFIX}t>'


def _formula(formula: Element) -> str:
    """A formula in one line."""
    return f"<{PREFIX}r>{_run(_linear(formula))}</{PREFIX}r>"


def _base(ruby: Element) -> str:
    """The characters, without their reading."""
    words = [part.text or "" for base in ruby.iter("rubyBase") for part in base.iter("t")]
    return _run("".join(words))


def _symbol(_: Element) -> str:
    """A blank for a picture of a font of symbols, whose letters mean others."""
    return _run(" ")


def _linear(node: Element) -> str:
    """The text of a formula with its fractions, exponents and roots in one line."""
    if node.tag == "t":
        return node.text or ""
    written = dict.fromkeys(OPERANDS, "")
    for child in node:
        written[child.tag] = written.get(child.tag, "") + _linear(child)
    pattern = FORMULAS.get(node.tag)
    if pattern is None:
        return "".join(map(_linear, node))
    for name in OPERANDS:
        # A single number or name needs no brackets
        if node.tag != "d" and len(written[name]) > 1 and not written[name].isalnum():
            written[name] = f"({written[name]})"
    signs = (mark.get("m:val") for mark in node.iter("chr"))
    return pattern.format(sign=next(signs, "∫"), **{name: written[name] for name in OPERANDS})


def _check_sheets(parts: dict[str, bytes], sheets: Sequence[str], options: ReadOptions) -> None:
    """Raises Unfit for too many rows, and for cells that share more text than is allowed."""
    lengths: list[int] = []
    name = "xl/sharedStrings.xml"
    if name in parts:
        items = every(tree_of(parts[name], name), "si")
        lengths = [sum(map(len, item.itertext())) for item in items]
    for sheet in sheets:
        rows = len(re.findall(rb"<(?:\w+:)?row\b", parts[sheet]))
        if rows > MAX_ROWS:
            raise Unfit(f"a sheet has {rows} rows, allowed are {MAX_ROWS}")
    room = options.max_document_characters
    for sheet in sheets:
        if parts[sheet].count(b't="s"') * max(lengths, default=0) > room:
            room -= sum(
                lengths[number]
                for number in map(int, SHARED.findall(parts[sheet]))
                if number < len(lengths)
            )
    if room < 0:
        raise Unfit(
            f"cells repeat shared texts, to more than {options.max_document_characters} characters"
        )


def _time_styles(parts: dict[str, bytes]) -> set[str]:
    """The numbers of the styles that show times of day or durations."""
    name = "xl/styles.xml"
    if name not in parts:
        return set()
    root = tree_of(parts[name], name)
    formats = set(TIME_FORMATS)
    for style in every(root, "numFmt"):
        code = re.sub(r'"[^"]*"|\\.|\[(?![hms]+\])[^\]]*\]', "", attribute(style, "formatCode"))
        if re.search(r"[hs]", code, re.IGNORECASE) and not re.search("[yd]", code, re.IGNORECASE):
            formats.add(int(attribute(style, "numFmtId") or 0))
    return {
        str(place)
        for styles in every(root, "cellXfs")
        for place, style in enumerate(styles)
        if int(attribute(style, "numFmtId") or 0) in formats
    }


def _time(cell: Element, styles: set[str]) -> str | None:
    """The cell with its time in words; None for any other cell."""
    value = cell.findtext("v") or ""
    is_time = cell.get("s") in styles and cell.get("t", "n") == "n"
    if not is_time or not re.fullmatch(r"\d{1,5}(\.\d{1,20})?([eE]-\d{1,2})?", value):
        return None
    seconds = round(float(value) * 86_400)
    time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    place = escape(cell.get("r", ""))
    words = f"<{PREFIX}is>{_run(time)}</{PREFIX}is>"
    return f'<{PREFIX}c r="{place}" t="inlineStr">{words}</{PREFIX}c>'
