"""Markdown: front matter, the title, and the text without comments."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import HEADING_MARK, Content, decoded, fence_after

FRONT_MATTER = re.compile(
    r"\A\s{0,100}(---|\+\+\+)[ \t]*\r?\n(.{0,20000}?)\r?\n\1[ \t]*(?:\r?\n|\Z)", re.DOTALL
)
# Code with all that it holds (in a fence, indented, within a line), or a comment
CODE_OR_COMMENT = re.compile(
    r"^ {0,3}(`{3,}|~{3,})(?s:.*?)(?:^ {0,3}\1[`~]*[ \t]*$|\Z)|"
    r"(?:\A|(?<=\n\n))(?:(?: {4}|\t).*\n?)+|"
    r"(?<!`)(`+)(?!`).*?(?<!`)\2(?!`)|"
    r"(?P<comment>^[ \t]*<!--(?:(?!-->)(?s:.))*-->[ \t]*\n|<!--(?s:.*?)-->)",
    re.MULTILINE,
)
LINK_COMMENT = re.compile(r"^\[(?://|comment|_)\]: *(?:#|<>).*\n?", re.MULTILINE)
# The title may stand below lines of badges, of tags and of nothing.
TITLE_LINES = 40
ATX = re.compile(r" {0,3}#[ \t]+(.{1,1000}?)[ \t]*#*\s*")
H1 = re.compile(r"\s{0,100}<h1\b[^>]{0,500}>(.{1,1000}?)</h1>\s{0,100}", re.IGNORECASE | re.DOTALL)
HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
UNDERLINE = re.compile(r" {0,3}([=-])\1+[ \t]*")
# A line that begins like this can be the text of an underlined heading.
PROSE = re.compile(r" {0,3}[^\s>|`~#\ufdd0-]")
SETEXT = re.compile(r" {0,3}=+\s*")
IMAGE = re.compile(r"!\[[^\]]{0,500}\](?:\([^)]{0,2000}\)|\[[^\]]{0,500}\])")
LINK = re.compile(r"\[([^\]]{0,500})\](?:\([^)]{0,2000}\)|\[[^\]]{0,500}\])")
ELEMENT = re.compile(r"</?[a-zA-Z][^>]{0,2000}>")


def read_markdown(data: bytes, options: ReadOptions) -> Content:
    """The text as it is written, without front matter, comments and the heading that is its
    title."""
    text, notes = decoded(data)
    front = FRONT_MATTER.match(text)
    metadata: dict[str, Any] = {}
    if front is not None:
        try:
            metadata = tomllib.loads(front[2]) if front[1] == "+++" else _yaml(front[2])
            text = text[front.end() :]
        except (ValueError, RecursionError) as error:
            notes = [*notes, f"front matter stays text, since it is not readable: {error}"[:200]]
    named = metadata.pop("title", None)
    text = _without_comments(text)
    title, below = _titled(text)
    if named and not isinstance(named, dict | list):
        # A heading of other words is text below the title that the front matter names
        if title != str(named):
            below = text
        title = str(named)
    text = below
    return Content(title, [_with_marks(text)], notes, metadata=metadata, is_wrapped=True)


def _yaml(text: str) -> dict[str, Any]:
    """A mapping without aliases, which could unfold to gigabytes. Raises ValueError."""
    import yaml

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has aliases")
        matter = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    if not isinstance(matter, Mapping):
        raise ValueError("it is no mapping")
    return dict(matter)


def _without_comments(text: str) -> str:
    """The text without comments, which stay within code. One that never ends is text."""
    text = LINK_COMMENT.sub("", text)
    end = text.rfind("-->") + len("-->\n")

    def code(part: re.Match[str]) -> str:
        return part[0].removeprefix(part["comment"] or "")

    return (CODE_OR_COMMENT.sub(code, text[:end]) + text[end:]).strip("\n")


def _titled(text: str) -> tuple[str | None, str]:
    """(the first heading, if it stands before all prose; the text without it)."""
    lines = text.split("\n", TITLE_LINES)
    for place, line in enumerate(lines[:TITLE_LINES]):
        above, below = lines[:place], lines[place + 1 :]
        heading = ATX.fullmatch(line)
        # A text of nothing but its title keeps it
        if heading is not None:
            return plain(heading[1]), "\n".join([*above, *below]).strip("\n") or text
        if line.strip() and below and SETEXT.fullmatch(below[0]):
            return plain(line), "\n".join([*above, *below[1:]]).strip("\n") or text
        element = H1.match("\n".join(lines[place : place + 5]))
        if element is not None:
            return plain(element[1]), text
        if plain(line):
            break
    return None, text


def _with_marks(text: str) -> str:
    """The text with a mark before each heading."""
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        fence = fence_after(line, fence)
        if fence:
            lines.append(line)
            continue
        # A line of = or - below a line of prose, which an empty line or nothing precedes
        underline = UNDERLINE.fullmatch(line)
        if underline and lines and PROSE.match(lines[-1]) and not "".join(lines[-2:-1]).strip():
            lines[-1] = f"{HEADING_MARK}{1 + (underline[1] == '-')}{lines[-1]}"
        heading = HEADING.match(line)
        if heading is not None:
            lines.append(f"{HEADING_MARK}{len(heading[1])}{line}")
        else:
            lines.append(line)
    return "\n".join(lines)


def plain(text: str) -> str | None:
    """The words of a line, without images, tags and the places of links."""
    words = ELEMENT.sub("", LINK.sub(r"\1", IMAGE.sub("", text))).split()
    return " ".join(words).strip("*_ ") or None
