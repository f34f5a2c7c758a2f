"""Headings of reStructuredText, AsciiDoc and Org: a mark before each line of one."""

from __future__ import annotations

import re

from hybridtei.retrieval.ingest.text import HEADING_MARK

UNDERLINE = re.compile(r"([=\-~^\"'`#*+:._<>])\1{2,}\s*")
MARKED = {".adoc": r"(={1,6})[ \t]+\S", ".asciidoc": r"(={1,6})[ \t]+\S", ".org": r"(\*+)[ \t]+\S"}
# Lines that open and close what is shown as it is
BLOCKS = re.compile(
    r"(-{4,}|\.{4,}|={4,}|\+{4,}|_{4,}|\*{4,})\s*|#\+(begin|end)_\w+.*", re.IGNORECASE
)


def with_headings(text: str, suffix: str) -> str:
    """The text of a file with this ending, with marks before its headings."""
    if suffix == ".rst":
        return "\n".join(_underlined(text.splitlines()))
    pattern = MARKED.get(suffix)
    if pattern is None:
        return text
    lines: list[str] = []
    block = ""
    for line in text.splitlines():
        edge = BLOCKS.fullmatch(line)
        heading = re.match(pattern, line)
        if edge is not None and not block:
            block = line[:4].lower()
        elif edge is not None and (line[:4].lower() == block or line.lower().startswith("#+end")):
            block = ""
        elif heading is not None and not block:
            lines.append(f"{HEADING_MARK}{min(len(heading[1]), 6)}{line}")
            continue
        lines.append(line)
    return "\n".join(lines)


def _underlined(lines: list[str]) -> list[str]:
    """The lines with marks. A level is the place of its style among those seen before."""
    styles: list[tuple[str, bool]] = []
    marked = list(lines)
    for place in range(1, len(lines)):
        words = lines[place - 1]
        line = lines[place]
        is_title = words.strip() and not UNDERLINE.fullmatch(words)
        if (
            not is_title
            or not UNDERLINE.fullmatch(line)
            or len(line.strip()) < min(4, len(words.strip()))
        ):
            continue
        above = lines[place - 2] if place > 1 else ""
        has_overline = above.strip() == line.strip()
        if (words.startswith(" ") or above.strip()) and not has_overline:
            continue
        style = line[0], has_overline
        if style not in styles:
            styles.append(style)
        marked[place - 1] = f"{HEADING_MARK}{min(styles.index(style) + 1, 6)}{words}"
    return marked
