"""Letters by Python's `email`, and boxes of them by `mailbox`: who wrote when, and all parts of
text."""

from __future__ import annotations

import email
import email.errors
import mailbox
import re
from collections.abc import Iterator
from contextlib import suppress
from email.header import decode_header
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.kinds import read_calendar
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import Content, Unfit, decoded

# The heads of a letter and of a box: some fields, of which one says who wrote and one what or when
LETTER = re.compile(
    rb"(?=(?:[\w-]{1,60}:[^\n]*\n(?:[ \t][^\n]*\n)*){0,100}?(?:From|Received|Return-Path):)"
    rb"(?=(?:[\w-]{1,60}:[^\n]*\n(?:[ \t][^\n]*\n)*){0,100}?(?:Subject|Date|Message-ID):)",
    re.IGNORECASE,
)
BOX = re.compile(rb"From \S[^\n]*\d{4}[^\n]*\n[\w-]{1,60}:")
FIELDS = ("From", "To", "Cc", "Date", "Subject")
MAX_PARTS, MAX_DEPTH, MAX_FIELD = 1000, 10, 50_000
# A plain version that has less than this share of the HTML's text is a stub
LEAST_SHARE = 0.3
READERS = {"text/html": read_html, "text/calendar": read_calendar}
NO_TEXT = ("text/css", "text/javascript")


def read_mail(data: bytes, options: ReadOptions) -> Content:
    """Sender, receivers, date and body; the subject is the title."""
    try:
        letter = _Letter(options)
        message = email.message_from_bytes(data)
        text = letter.text(message)
        fields = letter.fields(message)
    except (ValueError, LookupError, AttributeError, RecursionError, TypeError) as error:
        if isinstance(error, Unfit):
            raise
        raise Unfit(f"not readable as mail: {error!r}"[:200]) from None
    title = fields.pop("Subject", "")
    lines = [f"{name}: {value}" for name, value in fields.items()]
    metadata = {name.lower(): value for name, value in fields.items()}
    if "date" in metadata:
        metadata["date"] = _iso(metadata["date"])
    notes = list(dict.fromkeys(letter.notes))
    if letter.attachments:
        notes.append("attachments were not read")
        lines.append(f"Attachments: {', '.join(letter.attachments[:MAX_PARTS])}")
    return Content(
        title, ["\n".join([*lines, "", text])], notes, metadata=metadata, is_wrapped=True
    )


def letters(path: Path) -> Iterator[tuple[str | None, bytes]]:
    """Yield (its id if it names one, the bytes) of each letter of a box."""
    box = mailbox.mbox(path, create=False)
    waiting = b""
    try:
        for key in box.iterkeys():
            data = box.get_bytes(key, from_=True)
            # A line of a letter may begin like the next one
            if waiting and not BOX.match(data):
                waiting += data
                continue
            if waiting:
                yield _named(waiting)
            waiting = data
        yield _named(waiting)
    finally:
        box.close()


def _named(data: bytes) -> tuple[str | None, bytes]:
    # Boxes mark a letter's own lines that begin like the next letter
    data = re.sub(rb"^>(>*From )", rb"\1", data.partition(b"\n")[2], flags=re.MULTILINE)
    name = re.search(rb"^Message-ID:\s*<([^<>\s]{1,500})>", data, re.IGNORECASE | re.MULTILINE)
    return name and name[1].decode("ascii", "replace"), data


class _Letter:
    """What a letter holds beside its text: names of attachments, and notes."""

    def __init__(self, options: ReadOptions) -> None:
        self.attachments: list[str] = []
        self.notes: list[str] = []
        self._options = options
        self._parts = 0

    def fields(self, message: Message[Any, Any]) -> dict[str, str]:
        """The fields that are shown, without empty ones."""
        first: dict[str, str] = {}
        for name, value in message.raw_items():
            first.setdefault(name.title(), str(value))
        fields = {name: _words(first.get(name, "")) for name in FIELDS}
        return {name: words for name, words in fields.items() if words}

    def text(self, message: Message[Any, Any], depth: int = 0) -> str:
        """The text of a part and of the parts in it, a paragraph each."""
        self._parts += 1
        kind = message.get_content_type()
        if self._parts > MAX_PARTS or depth > MAX_DEPTH:
            self.notes.append("parts of the letter were left out")
            return ""
        parts: Any = message.get_payload()
        if not isinstance(parts, list):
            return self._leaf(message, kind)
        read = partial(self.text, depth=depth + 1)
        if kind == "multipart/alternative":
            texts = [read(part) for part in parts]
            longest = max(map(len, texts), default=0)
            return next((text for text in texts if len(text) > LEAST_SHARE * longest), "")
        if kind == "message/rfc822":
            heads = [f"{name}: {value}" for name, value in self.fields(parts[0]).items()]
            return "\n".join([*heads, "", read(parts[0])])
        return "\n\n".join(filter(None, map(read, parts)))

    def _leaf(self, message: Message[Any, Any], kind: str) -> str:
        payload = message.get_payload(decode=True)
        is_attached = message.get_content_disposition() == "attachment"
        is_text = kind.startswith(("text/", "multipart/")) and kind not in NO_TEXT
        if is_attached or not is_text or not isinstance(payload, bytes):
            name = message.get_filename()
            self.attachments.append(_words(name) if name else "unnamed")
            return ""
        text, notes = decoded(payload, message.get_content_charset())
        self.notes += notes
        if kind in READERS:
            text = "\n".join(READERS[kind](text.encode(), self._options).pages)
        if message.get_param("delsp") == "yes":
            text = re.sub(r" \r?\n", "", text)
        return text.strip()


def _words(field: str) -> str:
    """The words of a field, which may be encoded."""
    text = decoded(field[:MAX_FIELD].encode(errors="surrogateescape"))[0]
    with suppress(email.errors.MessageError):
        text = "".join(starmap(_decoded, decode_header(text)))
    return " ".join(text.split())


def _decoded(words: bytes | str, charset: str | None) -> str:
    """A part of a field. One of no encoding is written as Python writes it."""
    if isinstance(words, str):
        return words
    if charset is None:
        return words.decode("raw-unicode-escape")
    return decoded(words, charset)[0]


def _iso(date: str) -> str:
    """The date in ISO 8601, or as it is written."""
    try:
        return parsedate_to_datetime(date).isoformat()
    except (ValueError, TypeError, IndexError):
        return date
