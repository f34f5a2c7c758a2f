"""What readers give: documents, with the places of their headings and tables, and rejections.

Nothing heavy is imported here, since the reader's process starts with it.
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import orjson

DIGEST_BYTES = 16
MAX_PAGE = 1 << 31


@dataclass(frozen=True, slots=True)
class Outline:
    """Headings and tables of a text. `places`: (start, headings above, header of the table), where
    these change. `joins`: (start, end) of parts that are not cut if they fit: headings with the
    line below, and fences of code."""

    places: Sequence[tuple[int, str, str]] = ()
    joins: Sequence[tuple[int, int]] = ()

    def at(self, start: int) -> tuple[str, str]:
        """The headings and the header of a place."""
        number = bisect_right(self.places, start, key=itemgetter(0))
        return self.places[number - 1][1:] if number else ("", "")


@dataclass(frozen=True, slots=True)
class Document:
    """One document from a reader. `location`: its place in the source, for messages. `notes`: what
    a reader should be told of it. `earlier`: title, text and metadata as the first reading gave
    them, where they differ. `pages`: (start in the text, number) of each page. `outline`: where its
    headings and tables are. `id_kind`: what the source has as its id: a text, a number, or only the
    record's place."""

    source: str
    document_id: str
    text: str
    title: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""
    notes: Sequence[str] = ()
    earlier: tuple[str | None, str, Mapping[str, Any]] | None = None
    pages: Sequence[tuple[int, int]] = ()
    outline: Outline = Outline()
    id_kind: str = "text"

    @property
    def heading(self) -> str:
        """The title with its line end, or nothing."""
        return f"{self.title}\n" if self.title else ""

    @property
    def indexed_text(self) -> str:
        return f"{self.heading}{self.text}".strip()

    @property
    def shift(self) -> int:
        """The place in the indexed text where the text begins."""
        return len(self.heading)

    def context_at(self, start: int) -> str:
        """Title and headings above a place of the indexed text, and the header of its table."""
        path, header = self.outline.at(start - self.shift)
        if self.title and start:
            path = " > ".join(filter(None, (self.title, path)))
        return "\n".join(filter(None, (path, header)))

    def page_at(self, start: int) -> int | None:
        """The number of the page at a place of the indexed text."""
        if not self.pages:
            return None
        place = (start - self.shift, MAX_PAGE)
        return self.pages[max(0, bisect_right(self.pages, place) - 1)][1]

    def digest(self) -> str:
        """The 16-byte hash of the document's content in base64."""
        return _digest(self.title, self.text, self.metadata)

    def earlier_digest(self) -> str:
        """The digest that the first reading made."""
        return self.digest() if self.earlier is None else _digest(*self.earlier)


def _digest(title: str | None, text: str, metadata: Mapping[str, Any]) -> str:
    content = orjson.dumps([title, text, dict(metadata)], option=orjson.OPT_SORT_KEYS)
    return b64encode(blake2b(content, digest_size=DIGEST_BYTES).digest()).rstrip(b"=").decode()


@dataclass(frozen=True, slots=True)
class Rejection:
    """A part of a source that is not a document, and the reason. `written`: the part's content.
    `document_id`: the record's id, if it has one. `is_left_out`: its text is no content."""

    source: str
    location: str
    reason: str
    written: object = ""
    document_id: str | None = None
    is_left_out: bool = False
