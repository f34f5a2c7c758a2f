"""XML of any kind."""

from __future__ import annotations

import re

from hybridtei.retrieval.ingest.html import decoded_markup, read_html
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Content

TAG = re.compile(r"<(/?)(?:[\w.-]{1,40}:)?([\w.-]{1,80})([^<>]{0,5000})>")

# Attributes whose values are words
WORDS = re.compile(r"""\s(?:text|_note|message|description|summary|alt)=(["'])(.*?)\1""", re.DOTALL)


def read_xml(data: bytes, options: ReadOptions) -> Content:
    """The texts of all elements, in the lines of the file."""
    text, notes = decoded_markup(data)
    text = TAG.sub(_words, text.replace("<![CDATA[", "").replace("]]>", ""))
    page = read_html(f"\ufeff<pre>{text}</pre>".encode(), options).pages[0]
    lines = (" ".join(line.split()) for line in page.split("\n"))
    return Content(None, ["\n".join(line for line in lines if line)], notes)


def _words(tag: re.Match[str]) -> str:
    """The words that a tag holds itself, such as those of an outline."""
    return " " + "".join(f"{words} " for _, words in WORDS.findall(tag[3]))
