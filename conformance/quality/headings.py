"""Heading paths in dense vectors, on and off: nDCG@10 on manuals whose links are the judgements.

    python conformance/quality/headings.py /usr/share/doc/nodejs/api/{fs,stream,http}.md
    python conformance/quality/headings.py --html .../share/doc/rust/html/cargo/reference

A manual's author links a sentence to a section of another part of the manual. The sentence is a
query, and the section is what it asks for. A chunk is relevant if it has the section's heading or
begins within the section before its next heading. Chunks that hold the query's sentence are left
out of the ranking. Both runs ask the same queries in the default mode.
"""

from __future__ import annotations

import argparse
import html
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np

import hybridtei
from hybridtei import Encoder, Index
from hybridtei.retrieval.evaluate.measures import paired_bootstrap
from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.search.options import SearchHit

DEFINITION = re.compile(r"^\[([^\]]+)\]: ([\w.-]*)#([\w.-]+)$", re.MULTILINE)
REFERENCE = re.compile(r"\[([^\]]+)\]\[\]")
ANCHOR = re.compile(r'<a href="([\w./-]*)#([\w.-]+)">')
HEADING = re.compile(r'<h[1-6] id="([\w.-]+)"[^>]*>(.*?)</h[1-6]>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")
SENTENCE_WORDS = (6, 60)
Query = tuple[str, str, str, str]


def slug(heading: str) -> str:
    """The anchor that the manual's programs make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip("# ").lower()).strip().replace(" ", "-")


def markdown_links(path: Path) -> Iterator[Query]:
    """(file, sentence, file of the section, anchor) of a Markdown file."""
    text = path.read_text()
    targets = {name: (file or path.name, anchor) for name, file, anchor in DEFINITION.findall(text)}
    for paragraph in DEFINITION.sub("", text).split("\n\n"):
        if paragraph.startswith(("#", "```", "|", "<", ">")):
            continue
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
            names = [name for name in REFERENCE.findall(sentence) if name in targets]
            if len(names) == 1:
                yield path.name, " ".join(sentence.split()), *targets[names[0]]


def html_links(path: Path) -> Iterator[Query]:
    """The same of a page of HTML."""
    body = path.read_text().partition("<main>")[2].partition("</main>")[0]
    for paragraph in re.findall(r"<p>(.*?)</p>", body, re.DOTALL):
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
            links = ANCHOR.findall(sentence)
            if len(links) == 1:
                file, anchor = links[0]
                words = " ".join(html.unescape(TAG.sub("", sentence)).split())
                yield path.name, words, Path(file).name or path.name, anchor


def sections_of(path: Path, document: Document, is_html: bool) -> dict[str, tuple[int, int]]:
    """{anchor: (start, end)} of the sections in the indexed text."""
    text, shift = document.indexed_text, document.shift
    starts = [*sorted({shift + start for start, *_ in document.outline.places}), len(text)]
    anchors: dict[str, str] = {}
    if is_html:
        for anchor, words in HEADING.findall(path.read_text()):
            anchors.setdefault(" ".join(html.unescape(TAG.sub("", words)).split()), anchor)
    sections: dict[str, tuple[int, int]] = {}
    for start, end in pairwise(starts):
        line = text[start:end].partition("\n")[0]
        name = anchors.get(line, "") if is_html else slug(line)
        sections.setdefault(name, (start, end))
    return sections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--html", action="store_true")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--chunk-tokens", type=int)
    options = parser.parse_args()
    sections: dict[str, dict[str, tuple[int, int]]] = {}
    queries: list[Query] = []
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "manual"
        source.mkdir()
        for path in options.files:
            copy = source / path.name
            copy.write_bytes(path.read_bytes())
            (file,) = source_files(copy, path.name)
            for document, _ in documents_of(file, ReadOptions()):
                assert isinstance(document, Document), document
                sections[path.name] = sections_of(path, document, options.html)
            queries += html_links(path) if options.html else markdown_links(path)
        least, most = SENTENCE_WORDS
        queries = [
            query
            for query in dict.fromkeys(queries)
            if query[3] in sections.get(query[2], {})
            and query[3]
            and least <= len(query[1].split()) <= most
        ]
        random.Random(0).shuffle(queries)
        queries = queries[: options.queries]
        gains = [run(source, queries, sections, options, headings) for headings in (False, True)]
    off, on = (np.array(values) for values in gains)
    mean, low, high = paired_bootstrap(on - off)
    print(
        f"{len(options.files)} files, {len(queries)} queries: nDCG@10 off {off.mean():.4f}, "
        f"on {on.mean():.4f}: {mean:+.4f} (95 % interval {low:+.4f} to {high:+.4f})"
    )
    return 0


def run(
    source: Path,
    queries: list[Query],
    sections: dict[str, dict[str, tuple[int, int]]],
    options: argparse.Namespace,
    headings: bool,
) -> list[float]:
    """The nDCG@10 of each query."""
    gains: list[float] = []
    folder = source.parent / f"store-{headings}"
    with closing(Encoder.load()) as encoder:
        summary = hybridtei.ingest(
            source,
            "manual",
            encoder,
            folder,
            headings=headings,
            chunk_tokens=options.chunk_tokens,
            quarantine=str(folder) + ".jsonl",
            quiet=True,
        )
        print(headings, summary.in_words(), file=sys.stderr)
        with Index.open(folder, "manual", encoder) as index:
            for name, sentence, file, anchor in queries:
                words = re.sub(r"[\[\]`]", "", sentence)
                hits = index.search(words, limit=20, group_by=None)
                gains.append(gain(hits, (name, sentence, file, anchor), sections[file][anchor]))
    return gains


def gain(hits: list[SearchHit], query: Query, section: tuple[int, int]) -> float:
    """1 / log2(rank + 1) of the first chunk of the section among ten; 0 without it."""
    rank = 0
    name, sentence, file, _ = query
    start, end = section
    beginning = re.sub(r"\W", "", sentence)[:40]
    for hit in hits:
        payload = hit.payload
        chunk_end = payload["start"] + len(payload["text"])
        is_own = payload["source"].endswith(f"/{name}") and beginning in re.sub(
            r"\W", "", payload["text"]
        )
        if is_own:
            continue
        rank += 1
        if rank > 10:
            break
        has_section = payload["start"] < end and chunk_end > start
        if payload["source"].endswith(f"/{file}") and has_section:
            return float(1 / np.log2(rank + 1))
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
