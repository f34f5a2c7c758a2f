"""What a file is: its first bytes decide, and its ending where those are any text's."""

from __future__ import annotations

import gzip
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import zstandard

from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.kinds import (
    read_calendar,
    read_manual,
    read_notebook,
    read_subtitles,
    read_text,
)
from hybridtei.retrieval.ingest.mail import LETTER, read_mail
from hybridtei.retrieval.ingest.markdown import read_markdown
from hybridtei.retrieval.ingest.office import read_office
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.pdf import read_pdf
from hybridtei.retrieval.ingest.plain_xml import read_xml
from hybridtei.retrieval.ingest.text import Content, Unfit

Parse = Callable[[bytes, ReadOptions], Content]
# What one needs to see of a file
HEAD_BYTES = 65_536
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PACKED = (".gz", ".zst", ".zstd")
# A packed table may unfold to this many times its size
MAX_RATIO = 100
HTML = re.compile(
    rb"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<%.{0,1000}?%>\s*|<!--.{0,1000}?-->\s*){0,20}"
    rb"<(?:!doctype\s+html|(?:html|head|body|table|meta|title)\b)",
    re.IGNORECASE | re.DOTALL,
)
XML = re.compile(rb"\s*<\?xml\s")
FLAT_ODF = re.compile(rb"\s*<\?xml[^>]*>\s*(?:<!--.*?-->\s*)*<office:document\b", re.DOTALL)
SIGNS: tuple[tuple[bytes, Parse], ...] = (
    (b"%PDF-", read_pdf),
    (b"PK\x03\x04", read_office),
    (b"\xd0\xcf\x11\xe0", read_office),
    (b"{\\rtf", read_office),
    (b"BEGIN:VCALENDAR", read_calendar),
    (b"WEBVTT", read_subtitles),
)
BY_ENDING: dict[str, Parse] = {
    **dict.fromkeys((".md", ".markdown", ".mdx", ".qmd", ".rmd"), read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    **dict.fromkeys((".xml", ".svg", ".rss", ".atom", ".docbook", ".dbk", ".opml"), read_xml),
    **dict.fromkeys((".ics", ".ical"), read_calendar),
    **dict.fromkeys((".vtt", ".srt"), read_subtitles),
    **{f".{section}": read_manual for section in range(1, 10)},
    ".ipynb": read_notebook,
    **dict.fromkeys((".eml", ".mht", ".mhtml"), read_mail),
}
# Endings of files that are never text, although their bytes may look like it
OTHERS = frozenset(
    (".ps", ".eps", ".pem", ".key", ".crt", ".map", ".lock", ".pyc", ".so", ".zip", ".tar")
)


def parser_of(name: str, data: bytes) -> Parse:
    """The reader of a file; of plain text if nothing says more. Raises Unfit."""
    ending = Path(name).suffix.lower()
    if ending in OTHERS:
        raise Unfit(f"no reader for files ending in {ending!r}")
    signed = [parse for sign, parse in SIGNS if data.startswith(sign)]
    if ending == ".pdf" and b"%PDF-" in data[:1024]:
        signed.append(read_pdf)
    if signed:
        return signed[0]
    # A manual's section, such as .3pm
    by_ending = BY_ENDING.get(re.sub(r"^(\.[1-9])[a-z]{1,4}$", r"\1", ending))
    if by_ending is None or by_ending is read_xml:
        # Without the zeros and the mark of UTF-16
        head = data[:HEAD_BYTES].replace(b"\0", b"").lstrip(b"\xef\xbb\xbf\xff\xfe")
        by_ending = _markup(head) or by_ending
    return by_ending or partial(read_text, suffix=ending)


def _markup(head: bytes) -> Parse | None:
    """The reader of markup, or of a letter, that a text begins as."""
    if HTML.match(head):
        return read_html
    if FLAT_ODF.match(head):
        return read_office
    if XML.match(head):
        return read_xml
    return read_mail if LETTER.match(head) else None


def is_packed(path: Path) -> bool:
    """True if a file is gzip or zstd."""
    with path.open("rb") as file:
        return file.read(4).startswith((GZIP, ZSTD))


@contextmanager
def unpacked(path: Path, options: ReadOptions) -> Iterator[Path]:
    """A file with the content of a packed one. Raises Unfit for one that is broken, or unfolds too
    far."""
    limit = max(options.max_file_bytes, MAX_RATIO * path.stat().st_size)
    with path.open("rb") as file, tempfile.NamedTemporaryFile() as whole:
        try:
            with _unpacking(file) as content:
                while data := content.read(HEAD_BYTES):
                    whole.write(data)
                    if whole.tell() > limit:
                        raise Unfit(f"unfolds to more than {limit} bytes")
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise Unfit(f"not readable as a packed file: {error}") from None
        whole.flush()
        yield Path(whole.name)


def _unpacking(file: IO[bytes]) -> Any:
    is_gzip = file.read(2) == GZIP
    file.seek(0)
    if is_gzip:
        return gzip.GzipFile(fileobj=file)
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
