"""HTML as a reader sees it: a line a block, a line a row of a table, the lines of `pre`, and
nothing that is not shown.

The elements that separate are those with a block, list, table or form box in the HTML Standard's
rendering rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import HEADING_MARK, TABLE_END, TABLE_MARK, Content, decoded
from hybridtei.system.machine import require_extra


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


BLOCKS = _names(
    "address article aside blockquote body br button caption center dd details dialog dir div dl "
    "dt fieldset figcaption figure "
    "footer form frameset h1 h2 h3 h4 h5 h6 header hgroup hr legend li listing main menu nav ol "
    "optgroup option p plaintext pre "
    "search section select summary table tbody td textarea tfoot th thead tr ul xmp"
)
# Besides these, what an attribute or a class hides.
UNSEEN = _names("annotation annotation-xml head iframe rp rt script style svg template")
KEEPS_LINES = _names("listing plaintext pre textarea xmp")
HEADINGS = _names("h1 h2 h3 h4 h5 h6")
HIDDEN_STYLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
HIDDEN_ROLES = ("navigation", "contentinfo")
# Of parts that a click opens, and their ids in the attributes of what opens them
PANELS = re.compile(r"accordion|collaps|tab-?pane|tab-?content|tab-?panel|spoiler", re.IGNORECASE)
OPENERS = ("aria-controls", "data-target", "data-bs-target", "href")
# Links and line numbers that programs add: left out, and not counted
MARKS_OF_PAGES = re.compile(r"\b(headerlink|lineno|linenos|linenodiv)\b")
# What stands between the parts of a formula
FORMULAS = {
    **dict.fromkeys(("msup", "mover"), "^"),
    **dict.fromkeys(("msub", "munder"), "_"),
    **dict.fromkeys(("msubsup", "munderover"), "_^"),
    "mfrac": "/",
}
HIDDEN_CLASS = re.compile(
    r"(cookie|consent|gdpr)s?[-_]?(banner|bar|box|consent|dialog|law|message|modal|notice|"
    r"overlay|popup|warning)|onetrust|"
    r"cybotcookiebot|\b(headerlink|lineno|linenos|linenodiv)\b",
    re.IGNORECASE,
)
CHARSET = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""",
    re.IGNORECASE,
)
# What a server would have run
SERVER_CODE = re.compile(r"<%.{0,5000}?%>", re.DOTALL)
# A row whose cell has more lines than this is a layout, not a row of values.
MAX_CELL_LINES = 5
# Of columns or rows; a cell of more characters is not repeated in the rows that it spans
MAX_SPAN, MAX_COVERED = 100, 100
# Signs of notes, in place of a number
MARKS = "[*†‡§¶("
# The parser's time grows with the square of the depth, and with the number of open formatting
# elements at each tag.
MAX_DEPTH, MAX_FORMATTING, USUAL_FORMATTING, MAX_REOPENED = 256, 8, 2, 100_000
FORMATTING = _names("a b big code em font i nobr s small strike strong tt u")
ENDLESS = _names(
    "area base br col colgroup dd dt embed hr img input li link meta optgroup option p param rp "
    "rt source tbody td tfoot th thead "
    "tr track wbr"
)
# A tag that is long enough for many attributes; lists of options, which the parser reads in squares
LONG_TAG, MAX_ATTRIBUTES = re.compile(r"<([a-zA-Z][\w-]{0,40})\s[^<>]{2000,}>"), 500
LISTS = {"select": "div", "optgroup": "div", "option": "li"}
LISTED = re.compile(r"<(/?)(select|optgroup|option)(?=[\s/>])", re.IGNORECASE)
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)(?=[\s/>])")


def read_html(data: bytes, options: ReadOptions) -> Content:
    """The title of the head, and the visible text."""
    require_extra("qdrant", "selectolax")
    from selectolax.lexbor import LexborHTMLParser

    text, notes = decoded_markup(data)
    tree = LexborHTMLParser(_flattened(SERVER_CODE.sub("", text)))
    title = tree.css_first("head > title")
    reader = _Reader()
    if tree.body is not None:
        reader.read(tree.body)
    name = None
    if title is not None:
        name = title.text()
    if reader.hidden:
        notes = [
            *notes,
            f"{reader.hidden} menus, footers, hidden parts or drawings with words were left out",
        ]
    return Content(name, ["\n".join(reader.lines)], notes)


def decoded_markup(data: bytes) -> tuple[str, list[str]]:
    """The text and its notes, by the encoding that HTML or XML declares. Raises Unfit."""
    declared = CHARSET.search(data[:2048])
    return decoded(data, declared and declared[1].decode())


def _flattened(text: str) -> str:
    """The page without tags that are nested too deep, or have too many attributes, to be parsed in
    linear time."""
    text = LISTED.sub(lambda tag: f"<{tag[1]}{LISTS[tag[2].lower()]}", text)
    text = LONG_TAG.sub(_shortened, text)
    if text.count("<") < MAX_FORMATTING:
        return text
    depth = formatting = reopened = 0
    # The page up to `end`, with tags replaced
    parts, end = [], 0
    for tag in TAG.finditer(text):
        is_end, name = tag[1], tag[2].lower()
        if name in ENDLESS:
            reopened += max(0, formatting - USUAL_FORMATTING)
        elif is_end:
            depth = max(0, depth - 1)
            formatting = max(0, formatting - (name in FORMATTING))
        elif name in FORMATTING and (formatting >= MAX_FORMATTING or reopened > MAX_REOPENED):
            parts += [text[end : tag.start()], "<wbr"]
            end = tag.end()
        elif depth >= MAX_DEPTH:
            parts += [text[end : tag.start()], "<br"]
            end = tag.end()
        else:
            depth += 1
            formatting += name in FORMATTING
            reopened += max(0, formatting - USUAL_FORMATTING)
    return "".join([*parts, text[end:]])


def _shortened(tag: re.Match[str]) -> str:
    """The tag, without its attributes if they are many."""
    if len(tag[0].split(None, MAX_ATTRIBUTES)) > MAX_ATTRIBUTES:
        return f"<{tag[1]}>"
    return tag[0]


@dataclass(slots=True)
class _Row:
    """A row that is read. `start`: the first line of the cell that is read. `spans`: its columns
    and rows."""

    cells: list[list[str]] = field(default_factory=list)
    start: int = 0
    is_header: bool = True
    spans: tuple[int, int] = (1, 1)


@dataclass(slots=True)
class _Table:
    """A table that is read. `covered`: {column: (rows below, lines)} of cells that span rows."""

    has_header: bool = False
    covered: dict[int, tuple[int, list[str]]] = field(default_factory=dict)


class _Reader:
    """Walks a tree without recursion, since a page may be deep."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._inline: list[str] = []
        self._rows: list[_Row] = []
        self._tables: list[_Table] = []
        # Where each open superscript begins, and whether it is the mark of a note
        self._raised: list[tuple[int, bool]] = []
        self._keeps_lines = 0
        # Parts with words that were left out, and the ids that something on the page opens
        self.hidden = 0
        self._opened: set[str] | None = None

    def read(self, root: Any) -> None:
        """Read all that is below an element."""
        path: list[tuple[Any, bool]] = []
        node = root
        while node is not None:
            is_entered = self._enter(node)
            path.append((node, is_entered))
            node = node.child if is_entered else None
            # Leave elements until one has a next sibling; the root's siblings are not read
            while node is None and path:
                finished, is_entered = path.pop()
                if is_entered:
                    self._leave(finished)
                node = finished.next if path else None
        self._end_line()

    def _enter(self, node: Any) -> bool:
        """Begin an element, or take a text. Returns whether to read what is below."""
        # A doctype has no tag
        tag = node.tag or "-doctype"
        if tag == "-text":
            self._inline.append(node.text_content or "")
            return False
        if tag in BLOCKS:
            self._end_line()
        if tag in UNSEEN or tag.startswith(("-", "!")) or self._is_hidden(node):
            self.hidden += tag == "svg" and node.css_first("text") is not None
            return False
        self._separate(node, tag)
        if tag in ("img", "area"):
            self._inline.append(f" {node.attributes.get('alt') or ''} ")
        elif tag in KEEPS_LINES:
            self._keeps_lines += 1
        elif tag == "table":
            self._tables.append(_Table())
        elif tag == "tr":
            self._rows.append(_Row())
            self._cover()
        elif tag in ("td", "th") and self._rows:
            self._rows[-1].start = len(self.lines)
            self._rows[-1].spans = (
                _span(node.attributes.get("colspan")),
                _span(node.attributes.get("rowspan")),
            )
        elif tag == "sup":
            is_mark = node.css_first("a") is not None or node.parent.tag == "a"
            self._raised.append((len(self._inline), is_mark))
        return True

    def _separate(self, node: Any, tag: str) -> None:
        """Set the parts of a formula apart, and the number of a note."""
        parent = node.parent
        if parent is not None and parent.tag in FORMULAS:
            # None has more than three parts: a page's own may have thousands
            parts = [child.mem_id for child in islice(parent.iter(), 3)]
            if node.mem_id in parts[1:]:
                place = parts.index(node.mem_id)
                self._inline += FORMULAS[parent.tag][place - 1 : place]
            self._inline += "(" * (tag == "mrow")
        if tag == "msqrt":
            self._inline.append("√(")
        if tag == "a" and "noteref" in "".join(map(str, node.attributes.values())):
            self._inline.append(" ")

    def _leave(self, node: Any) -> None:
        tag = node.tag
        is_part = node.parent is not None and node.parent.tag in FORMULAS
        if tag == "msqrt" or (tag == "mrow" and is_part):
            self._inline.append(")")
        if tag == "sup" and self._raised:
            self._end_raised(*self._raised.pop())
        if tag not in BLOCKS:
            return
        mark = ""
        if tag in HEADINGS and not self._rows:
            mark = f"{HEADING_MARK}{tag[1]}"
        self._end_line(mark)
        if tag in KEEPS_LINES:
            self._keeps_lines = max(0, self._keeps_lines - 1)
        elif tag in ("td", "th") and self._rows:
            row = self._rows[-1]
            row.is_header = row.is_header and tag == "th"
            self._end_cell(row, self.lines[row.start :])
            del self.lines[row.start :]
        elif tag == "tr" and self._rows:
            self._end_row(self._rows.pop())
        elif tag == "table" and self._tables and self._tables.pop().has_header:
            self.lines.append(TABLE_END)

    def _end_raised(self, start: int, is_mark: bool) -> None:
        """Set an exponent apart by ^, and the mark of a note by a blank."""
        words = "".join(self._inline[start:]).strip()
        before = "".join(self._inline[:start][-1:])[-1:]
        if not words or not before or before.isspace():
            return
        if is_mark or words[0] in MARKS:
            self._inline.insert(start, " ")
        elif not words.isalpha():
            self._inline.insert(start, "^")

    def _cover(self) -> None:
        """Fill the next columns of a row that cells of rows above reach into."""
        row = self._rows[-1]
        while self._tables and len(row.cells) in self._tables[-1].covered:
            column = len(row.cells)
            rows, lines = self._tables[-1].covered.pop(column)
            row.cells.append(lines)
            if rows > 1:
                self._tables[-1].covered[column] = rows - 1, lines

    def _end_cell(self, row: _Row, lines: list[str]) -> None:
        """Add a cell, and what it covers: blanks beside it, and itself below if it is short."""
        columns, rows = row.spans
        short = lines if sum(map(len, lines)) <= MAX_COVERED else []
        for number in range(columns):
            place = len(row.cells)
            row.cells.append([] if number else lines)
            if rows > 1 and self._tables:
                self._tables[-1].covered[place] = rows - 1, [] if number else short
        self._cover()

    def _end_line(self, mark: str = "") -> None:
        text = "".join(self._inline)
        self._inline.clear()
        if not text.strip():
            return
        if self._keeps_lines:
            self.lines += text.rstrip().strip("\n").split("\n")
        else:
            self.lines.append(mark + " ".join(text.split()))

    def _end_row(self, row: _Row) -> None:
        """Write the cells in one line, or as the blocks of a layout."""
        has_table = any(line[:1] in (TABLE_MARK, TABLE_END) for cell in row.cells for line in cell)
        if has_table or max(map(len, row.cells), default=0) > MAX_CELL_LINES:
            self.lines += [line for cell in row.cells for line in cell]
            return
        while row.cells and not row.cells[-1]:
            row.cells.pop()
        line = " | ".join(" ".join(cell) for cell in row.cells).strip()
        if not line.strip(" |"):
            return
        if (
            row.is_header
            and len(row.cells) > 1
            and self._tables
            and not self._tables[-1].has_header
        ):
            self._tables[-1].has_header = True
            line = TABLE_MARK + line
        self.lines.append(line)

    def _is_hidden(self, node: Any) -> bool:
        """True for what the page never shows. What a click opens is text; the rest is counted, if
        it has words."""
        attributes = node.attributes
        is_margin = node.tag in ("nav", "footer")
        if not attributes and not is_margin:
            return False
        name = attributes.get("id") or ""
        style = attributes.get("style") or ""
        is_closed = "hidden" in attributes and attributes["hidden"] != "until-found"
        if is_margin or attributes.get("role") in HIDDEN_ROLES:
            is_hidden = True
        elif is_closed or HIDDEN_STYLE.search(style) or attributes.get("aria-hidden") == "true":
            is_hidden = not self._is_opened(node, name)
        else:
            is_banner = HIDDEN_CLASS.search(attributes.get("class") or "") is not None
            is_hidden = is_banner or (
                HIDDEN_CLASS.search(name) is not None and not _is_section(node, name)
            )
            is_hidden = is_hidden and node.tag not in ("body", "main")
            if is_hidden and MARKS_OF_PAGES.search(attributes.get("class") or ""):
                return True
        if is_hidden and (node.text() or "").strip():
            self.hidden += 1
        return is_hidden

    def _is_opened(self, node: Any, name: str) -> bool:
        """True if something on the page opens the element of this id."""
        attributes = node.attributes
        if attributes.get("role") == "tabpanel" or PANELS.search(attributes.get("class") or ""):
            return True
        if self._opened is None:
            self._opened = set()
            top = node
            while top.parent is not None:
                top = top.parent
            for opener in top.css("[aria-controls], [data-target], [data-bs-target], a[href]"):
                for target in OPENERS:
                    self._opened.update((opener.attributes.get(target) or "").split())
        return bool(name) and bool({name, f"#{name}"} & self._opened)


def _span(written: str | None) -> int:
    """The columns or rows of a cell, at most 100."""
    if written is None or not written.strip().isdecimal():
        return 1
    return max(1, min(int(written.strip()[:4]), MAX_SPAN))


def _is_section(node: Any, name: str) -> bool:
    """True if an id is that of a section: its heading has the same words."""
    if node.tag in HEADINGS or node.tag in ("section", "article"):
        return True
    heading = node.css_first("h1, h2, h3, h4, h5, h6")
    if heading is None:
        return False
    words = re.findall(r"\w+", (heading.text() or "").lower())
    return words == re.findall(r"[^\W_]+", name.lower())
