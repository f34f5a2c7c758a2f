"""Training pairs: a short text (title, question, sentence) and the longer text it belongs to.

No labels are needed beyond the pairing itself; the teacher (see `teacher.py`) grades the other texts of a batch.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


class Pair(NamedTuple):
    """A query and the text that answers it."""

    query: str
    text: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a JSON-lines file of objects with "query" (or "title") and "text".

    Raises ValueError, naming the line, for a line that is not such an object.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_pair(line, f"{path}:{number}")


def _parse_pair(line: str, place: str) -> Pair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    query, text = fields.get("query", fields.get("title")), fields.get("text")
    if isinstance(query, str) and isinstance(text, str):
        return Pair(query.strip(), text.strip())
    raise ValueError(f'{place}: expected an object with the strings "query" (or "title") and "text"')


def select_pairs(pairs: Iterable[Pair], min_words: int, opening: int) -> list[Pair]:
    """Drop pairs whose text is under `min_words` words, and repeats; the first of its kind is kept.

    Repeats are an equal query, or a text which opens with the same `opening` characters: such a text would stand in
    a batch as a wrong answer to its own query.
    """
    queries: set[str] = set()
    openings: set[str] = set()
    kept: list[Pair] = []
    for pair in pairs:
        query, start = pair.query.casefold(), pair.text[:opening].casefold()
        if not query or len(pair.text.split()) < min_words or query in queries or start in openings:
            continue
        queries.add(query)
        openings.add(start)
        kept.append(pair)
    return kept


def sentence_pairs(pairs: Iterable[Pair], min_words: int, seed: int) -> list[Pair]:
    """Make (sentence, rest of the text) pairs: longer, more natural queries than titles are.

    One sentence of 5 to 40 words is drawn from every text of three sentences or more; what is left of the text must
    still have `min_words` words.
    """
    draw = random.Random(seed)
    made: list[Pair] = []
    for pair in pairs:
        sentences = SENTENCE_END.split(pair.text)
        usable = [place for place, sentence in enumerate(sentences) if 5 <= len(sentence.split()) <= 40]
        if len(sentences) < 3 or not usable:
            continue
        place = draw.choice(usable)
        rest = " ".join(sentences[:place] + sentences[place + 1 :])
        if len(rest.split()) >= min_words:
            made.append(Pair(sentences[place], rest))
    return made


APT_HELPER = "/usr/lib/apt/apt-helper"
FIELD = "Description-en:"


def read_translations(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a `Translation-en` file: plain, .gz, .xz, or .lz4 (with apt's helper or the lz4 program).

    Raises RuntimeError where an .lz4 file cannot be read for want of either program, or is damaged.
    """
    return parse_translations(_lines(path))


def parse_translations(lines: Iterable[str]) -> Iterator[Pair]:
    """Yield (short description, long description) for every paragraph which has both.

    Wrapped lines are joined into paragraphs; an empty line stays between paragraphs.
    """
    title = ""
    body: list[str] = []
    for line in lines:
        if line.startswith(FIELD):
            title, body = line[len(FIELD) :].strip(), []
        elif title and line.startswith((" ", "\t")):
            body.append("" if line.strip() == "." else line.strip())
        elif title:
            yield from _pair(title, body)
            title = ""
    if title:
        yield from _pair(title, body)


def _pair(title: str, body: list[str]) -> Iterator[Pair]:
    paragraphs = "\n".join(body).split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()
    if text:
        yield Pair(title, text)


def _lines(path: Path) -> Iterator[str]:
    if path.suffix == ".lz4":
        yield from _unpack_lz4(path).splitlines()
        return
    with _open_packed(path) as packed:
        yield from io.TextIOWrapper(packed, encoding="utf-8", errors="replace")


def _open_packed(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else path.open("rb")


def _unpack_lz4(path: Path) -> str:
    if Path(APT_HELPER).exists():
        command = [APT_HELPER, "cat-file", str(path)]
    elif lz4 := shutil.which("lz4"):
        command = [lz4, "--decompress", "--stdout", str(path)]
    else:
        raise RuntimeError(f"{path}: reading .lz4 needs apt or the lz4 program")
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path}: {command[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode("utf-8", errors="replace")
