"""Other files of text: markup, manual pages, notebooks, calendars, subtitles, and any other
file of text that has no reader of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from itertools import chain
from typing import Any

from hybridtei.retrieval.ingest.headings import with_headings
from hybridtei.retrieval.ingest.html import read_html
from hybridtei.retrieval.ingest.markdown import read_markdown
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import HEADING_MARK, Content, Unfit, decoded

# Formats of ASCII characters that are no text to read.
NO_TEXT = (b"%!PS", b"%PDF-")
TITLES = {
    ".rst": re.compile(
        r"\A\s{0,100}(?:[=~#*-]{3,}\n)?[ ]?(\S.{0,200})\n[=~#*-]{3,}[ \t]*$", re.MULTILINE
    ),
    ".adoc": re.compile(r"^= (\S.{0,200})$", re.MULTILINE),
    ".org": re.compile(r"^#\+title: *(\S.{0,200})$", re.MULTILINE | re.IGNORECASE),
    ".tex": re.compile(r"\\title\{([^{}]{1,200})\}"),
}
PROSE = ("", ".txt", ".text", ".rst", ".adoc", ".asciidoc", ".org", ".tex", ".log")
# Characters of a cell's output
MAX_OUTPUT = 20_000
JSON = (".json", ".geojson", ".jsonld", ".har", ".webmanifest")
# Of a character by its number, or of another character
ESCAPES = re.compile(r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4})|\\.")
# Blocks of subtitles that show nothing, and what stands above the words of others
SUBTITLE_MARKS = re.compile(
    r"^(?:WEBVTT|NOTE|STYLE|REGION)\b.*(?:\n.+)*|^(?:.*\n)?[\d:.,]+ --> .*", re.MULTILINE
)
SUBTITLE_TAGS = re.compile(r"<[^<>]{0,200}>|\{\\[^{}]{0,200}\}")
CALENDAR_LINES = re.compile(
    r"(SUMMARY|DESCRIPTION|LOCATION|DTSTART|DTEND|DUE|ORGANIZER|ATTENDEE|CATEGORIES|COMMENT|"
    r"CONTACT)[;:]"
)
ROFF_FONT = re.compile(r"\\f(?:\[[^\]]{0,20}\]|\(..|.)|\\s[+-]?\d|\\[&/,|^%:c]|\\\".*")
ROFF_NAMES = {
    "aq": "'",
    "dq": '"',
    "lq": "“",
    "rq": "”",
    "oq": "‘",
    "cq": "’",
    "em": "—",
    "en": "–",
    "bu": "•",
    "rs": "\\",
    "ha": "^",
    "ti": "~",
    "co": "©",
    "mu": "×",
    "->": "→",
}
ROFF_CHARACTER = re.compile(r"\\(?:\((..)|\[([^\]]{1,20})\]|([-e .~0'`]))")
ROFF_SILENT = re.compile(
    r"(TH|Dd|Dt|Os|de|ig|ds|nr|ie|el|if|so|ft|in|ti|ad|hy|na|nh|ne|sp|br|ta|tr|ll|rm|als|\.|\\).*"
)


def read_text(data: bytes, options: ReadOptions, suffix: str = "") -> Content:
    """The text as it is written. Raises Unfit for data that are no text."""
    if data.startswith(NO_TEXT):
        raise Unfit("no reader for this format, whose characters are no text")
    try:
        text, notes = decoded(data)
    except Unfit:
        raise Unfit(f"no reader for files ending in {suffix!r} of binary data") from None
    if suffix in JSON:
        text = ESCAPES.sub(_unescaped, text)
    pattern = TITLES.get(suffix)
    title = pattern and pattern.search(text[:20_000])
    text = with_headings(text, suffix)
    return Content(title and title[1], [text], notes, is_wrapped=suffix in PROSE)


def _unescaped(written: re.Match[str]) -> str:
    """The characters of a run of escapes, as they are where JSON needs the escape."""
    if written[1] is None:
        return written[0]
    characters: str = json.loads(f'"{written[0]}"')
    if characters.isprintable() and not set('"\\').intersection(characters):
        return characters
    return written[0]


def read_manual(data: bytes, options: ReadOptions) -> Content:
    """A manual page without the commands of roff, or any other text."""
    text, notes = decoded(data)
    if not re.search(r"^\.(TH|Dd|so)\b", text[:20_000], re.MULTILINE):
        return Content(None, [text], notes)
    return Content(None, ["\n".join(_manual_lines(text))], notes)


def _manual_lines(text: str) -> Iterator[str]:
    for line in ROFF_CHARACTER.sub(_roff_character, ROFF_FONT.sub("", text)).splitlines():
        command = re.match(r"[.'] *([A-Za-z]{1,3})?(?:[ \t]+(.*))?", line)
        if command is None:
            yield line
            continue
        name, words = command[1] or "", (command[2] or "").replace('"', "")
        # A section's level is 1, a subsection's (`SS`) is 2
        if name in ("SH", "SS", "Sh", "Ss"):
            yield f"{HEADING_MARK}{1 + name.upper().count('S', 1)}{words}"
        elif not name or ROFF_SILENT.fullmatch(name):
            continue
        elif name in ("Fl", "Xr"):
            yield f"-{words}" if name == "Fl" else words.replace(" ", "(", 1) + ")"
        else:
            yield words


def _roff_character(written: re.Match[str]) -> str:
    name = written[1] or written[2]
    if name and name.startswith("u") and len(name) > 4:
        return "".join(chr(int(number, 16)) for number in re.findall("[0-9A-F]{4,6}", name))
    if name:
        return ROFF_NAMES.get(name, name)
    return {"e": "\\", "~": " ", "0": " "}.get(written[3], written[3])


def read_notebook(data: bytes, options: ReadOptions) -> Content:
    """The cells of a notebook of format 3 or 4 as Markdown, with what they print."""
    texts: list[str] = []
    pictures = 0
    try:
        notebook = json.loads(decoded(data)[0])
        sheets = notebook.get("worksheets") or [notebook]
        for cell in chain.from_iterable(sheet["cells"] for sheet in sheets):
            kind = cell["cell_type"]
            source = "".join(cell["input" if kind == "code" and "input" in cell else "source"])
            if kind == "heading":
                source = f"{'#' * int(cell.get('level', 1))} {source}"
            texts.append(_fenced(source) if kind == "code" else source)
            for output in cell.get("outputs", ()):
                words = _output(output, options)
                texts.append(_fenced(words[:MAX_OUTPUT]))
                pictures += not words.strip()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unfit(f"not readable as a notebook: {error!r}"[:200]) from None
    content = read_markdown("\n\n".join(filter(None, texts)).encode(errors="replace"), options)
    if pictures:
        note = f"{pictures} outputs without text, such as pictures, were not read"
        content = replace(content, notes=[*content.notes, note])
    return content


def _output(output: dict[str, Any], options: ReadOptions) -> str:
    """What a cell printed, its value, or its error."""
    bundle = output.get("data") or output
    kinds = ("text/markdown", "text/plain", "text", "text/latex")
    words = "".join(next(filter(None, map(bundle.get, kinds)), ""))
    # What Python says of an object that a notebook shows otherwise
    is_stand_in = not words or words.startswith("<IPython.core.display")
    if is_stand_in and "text/html" in bundle:
        page = "".join(bundle["text/html"])
        words = "\n".join(read_html(page.encode(), options).pages)
    if "evalue" in output:
        words = f"{output.get('ename')}: {output['evalue']}"
    is_picture = any(name.startswith(("image/", "png", "jpeg", "svg")) for name in bundle)
    return "" if is_picture else "".join(words)


def _fenced(text: str) -> str:
    if not text.strip():
        return ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def read_calendar(data: bytes, options: ReadOptions) -> Content:
    """What, when, where and who of each entry."""
    text, notes = decoded(data)
    lines = re.sub(r"\r?\n[ \t]", "", text).splitlines()
    shown: list[str] = []
    for line in lines:
        if line.startswith("BEGIN:V"):
            shown.append("")
        elif CALENDAR_LINES.match(line):
            shown.append(re.sub(r"^(\w+)[^:]{0,1000}:", r"\1: ", line))
    plain = re.sub(r"\\([,;\\])", r"\1", re.sub(r"\\[nN]", "\n", "\n".join(shown)))
    return Content(None, [plain], notes)


def read_subtitles(data: bytes, options: ReadOptions) -> Content:
    """The words that are shown, without times; words that stay for the next time are there once."""
    text, notes = decoded(data)
    lines: list[str] = []
    text = SUBTITLE_MARKS.sub("", "\n".join(text.splitlines()))
    for line in text.splitlines():
        words = unescape(SUBTITLE_TAGS.sub("", line)).strip()
        if words and words not in lines[-2:]:
            lines.append(words)
    return Content(None, ["\n".join(lines)], notes)
