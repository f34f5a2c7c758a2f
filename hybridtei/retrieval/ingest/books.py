"""Books of EPUB, and other XML."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import unquote

from hybridtei.retrieval.ingest.archive import Archive, attribute, every, tree_of
from hybridtei.retrieval.ingest.html import decoded_markup, read_html
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Content, Unfit

TAG = re.compile(r"<(/?)(?:[\w.-]{1,40}:)?([\w.-]{1,80})([^<>]{0,5000})>")


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


def read_xml(data: bytes, options: ReadOptions) -> Content:
    """The texts of all elements, in the lines of the file."""
    text, notes = decoded_markup(data)
    text = TAG.sub(" ", text.replace("<![CDATA[", "").replace("]]>", ""))
    page = read_html(f"\ufeff<pre>{text}</pre>".encode(), options).pages[0]
    lines = (" ".join(line.split()) for line in page.split("\n"))
    return Content(None, ["\n".join(line for line in lines if line)], notes)
