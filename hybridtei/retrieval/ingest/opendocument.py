"""OpenDocument, as an archive or as one file of XML: its elements become those of HTML, which is
then read.

Deleted text is left out. Comments and footnotes stand behind the text, which has a number for each.
"""

from __future__ import annotations

from html import escape
from xml.etree.ElementTree import Element

from hybridtei.retrieval.ingest.archive import Archive, attribute, every, local, title_of, tree_of
from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Content, Unfit

BODY = ("text", "spreadsheet", "presentation", "drawing")
# Not text of the document: deletions, settings, forms, and what readers of a ruby see small
UNREAD = ("tracked-changes", "sequence-decls", "forms", "scripts", "ruby-text", "thumbnail")
NAMES = {
    "p": "p",
    "list": "ul",
    "list-item": "li",
    "table": "table",
    "title": "p",
    "desc": "p",
}
BLANKS = {"s": " ", "tab": " ", "line-break": "<br>"}
MAX_REPEATED = 1_000


def read_odf(data: bytes, options: ReadOptions) -> Content:
    """A text, a sheet or slides of OpenDocument."""
    if not data.startswith(b"PK"):
        return _Reader().content([tree_of(data, "the file")], options)
    archive = Archive(data)
    parts = archive.xml()
    if b"encryption-data" in parts.get("META-INF/manifest.xml", b""):
        raise Unfit("is encrypted")
    if "content.xml" not in parts:
        raise Unfit("not readable: it has no content.xml")
    roots = [tree_of(parts[name], name) for name in ("content.xml", "styles.xml") if name in parts]
    reader = _Reader()
    return reader.content(roots, options, title_of(parts, "meta.xml"))


class _Reader:
    """Writes the HTML of a document. `notes`: its comments and footnotes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._raised: set[str] = set()
        self._room = 0
        self._objects = 0
        self._is_first_row = False

    def content(
        self, roots: list[Element], options: ReadOptions, title: str | None = None
    ) -> Content:
        """The document of these trees: the content, and perhaps the styles."""
        self._room = options.max_document_characters
        for root in roots:
            for style in every(root, "style"):
                for words in every(style, "text-properties"):
                    if attribute(words, "text-position").startswith("super"):
                        self._raised.add(attribute(style, "name"))
        bodies = [part for body in every(roots[0], "body") for part in body if local(part) in BODY]
        if not bodies:
            raise Unfit("holds no body of OpenDocument")
        pages = [part for body in bodies for part in every(body, "page")]
        is_paged = bool(pages)
        written = [self._inside(part) for part in pages or bodies]
        # What stands above and below all pages
        margins = [self._inside(part) for root in roots for part in every(root, "header", "footer")]
        written = [*written, *self.notes, *dict.fromkeys(margins)]
        texts = [read_html(f"\ufeff<body>{page}".encode(), options).pages[0] for page in written]
        notes = []
        if self._objects:
            notes = [
                f"{self._objects} embedded objects, such as formulas and charts, were not read"
            ]
        described = (part for meta in every(roots[0], "meta") for part in every(meta, "title"))
        title = title or next((part.text for part in described), None)
        return Content(title, texts, notes, is_paged=is_paged)

    def _inside(self, node: Element) -> str:
        """The HTML of what an element holds."""
        parts = [self._words(node.text)]
        for child in node:
            # Comments of XML have no name
            if isinstance(child.tag, str):
                parts.append(self._element(child))
            parts.append(self._words(child.tail))
        return "".join(parts)

    def _words(self, text: str | None) -> str:
        words = text or ""
        self._room -= len(words)
        if self._room < 0:
            raise Unfit("the text is longer than allowed: see --max-document-characters")
        return escape(words)

    def _element(self, node: Element) -> str:
        name = local(node)
        if name in UNREAD:
            return ""
        if name in BLANKS:
            return BLANKS[name]
        if name in ("annotation", "note"):
            return self._note(node)
        if name == "table-row":
            return self._row(node)
        if name == "table":
            self._is_first_row = True
        self._objects += name == "object"
        tag = NAMES.get(name)
        if name == "h":
            tag = f"h{min(int(attribute(node, 'outline-level') or 1), 6)}"
        elif name == "span" and attribute(node, "style-name") in self._raised:
            tag = "sup"
        inside = self._inside(node)
        if tag is None:
            return inside
        return f"<{tag}>{inside}</{tag}>"

    def _row(self, node: Element) -> str:
        """A row as often as it says, without the empty cells that fill it to its end."""
        tag = ("td", "th")[self._is_first_row]
        cells: list[str] = []
        end = 0
        for cell in node:
            # What a span covers has a place already
            if local(cell) != "table-cell":
                continue
            inside = self._inside(cell)
            cells += [_cell(cell, tag, inside)] * _count(cell, "columns")
            if inside:
                end = len(cells)
        if not end:
            return ""
        self._is_first_row = False
        count = _count(node, "rows")
        written = f"<tr>{''.join(cells[:end])}</tr>" * count
        self._room -= len(written) - len(written) // count
        if self._room < 0:
            raise Unfit("cells that repeat make the text longer than allowed")
        return written

    def _note(self, node: Element) -> str:
        """The mark of a footnote; nothing for a comment. Their words are kept for later."""
        if local(node) == "annotation":
            author = "".join(name.text or "" for name in every(node, "creator"))
            words = "".join(self._element(child) for child in node if local(child) in ("p", "list"))
            self.notes.append(f"<p>Comment ({escape(author)}):</p>{words}")
            return ""
        mark = escape("".join("".join(cite.itertext()) for cite in every(node, "note-citation")))
        words = "".join(self._inside(body) for body in every(node, "note-body"))
        self.notes.append(f"[{mark}] {words}")
        return f"[{mark}]"


def _count(node: Element, what: str) -> int:
    """How often a cell or a row repeats."""
    return max(1, min(int(attribute(node, f"number-{what}-repeated") or 1), MAX_REPEATED))


def _cell(node: Element, tag: str, inside: str) -> str:
    columns = attribute(node, "number-columns-spanned") or "1"
    rows = attribute(node, "number-rows-spanned") or "1"
    return f'<{tag} colspan="{escape(columns)}" rowspan="{escape(rows)}">{inside}</{tag}>'
