"""Explains why a point was found: the scores of each stage of a search, and the terms that query
and text share.

A term's weight is the product of its sparse weights in query and document: its part of the sparse
score, without a collection's idf. Sparse dimensions are pieces of words (`aero`, `##foil`), so
adjacent pieces are shown as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from hybridtei.models.text.tokenizer import Token
from hybridtei.retrieval.ingest.chunking import DOCUMENT_ID, SOURCE, TITLE
from hybridtei.retrieval.search.options import Highlight, SearchOptions, SearchResult
from hybridtei.retrieval.store.own import text_of
from hybridtei.system.terminal import BOLD, PLAIN

EXCERPT_CHARACTERS = 300
MARK = "*"


def as_json(result: SearchResult) -> str:
    """A result as one line of JSON."""
    return orjson.dumps(result.as_dict()).decode()


def in_words(result: SearchResult, options: SearchOptions, *, colours: bool = False) -> str:
    """A few lines a hit. `colours`: for a terminal; otherwise asterisks mark matching terms."""
    lines: list[str] = []
    for place, hit in enumerate(result.hits, options.offset + 1):
        name = hit.payload.get(TITLE) or hit.payload.get(DOCUMENT_ID) or ""
        # A row is known by its file too
        names = (hit.payload.get(SOURCE), hit.payload.get(DOCUMENT_ID))
        identity = " ".join(dict.fromkeys(str(part) for part in names if part)) or hit.id
        others = f"  (+{hit.more} more)" if hit.more else ""
        chance = ""
        if hit.probability is not None:
            chance = f"  {hit.probability:.0%}"
        lines.append(
            f"{place:3}  {hit.score:.4f}{chance}  {_one_line(str(name))[:100]}  "
            f"[{identity}]{others}"
        )
        text = text_of(hit.payload, options.text_field)
        if text:
            lines.append(f"     {_marked(text, hit.highlights or [], colours)}")
        if hit.scores:
            lines.append(
                "     "
                + "   ".join(
                    _score(stage, score.score, score.rank) for stage, score in hit.scores.items()
                )
            )
    if not result.hits:
        bound = ""
        if result.answerable is not None:
            bound = " that reaches the bound"
        lines.append(": ".join(filter(None, [f"nothing was found{bound}", result.note])))
    if options.explain:
        lines.extend(["", f"{'stage':14}{'ms':>9}{'points':>8}"])
        lines.extend(
            f"{stage.name:14}{stage.milliseconds:9.1f}{stage.candidates:8}"
            for stage in result.stages
        )
    return "\n".join(lines)


def _score(stage: str, score: float, rank: int | None) -> str:
    words = f"{stage} {score:.4f}"
    if rank is not None:
        words += f" (place {rank})"
    return words


def _marked(text: str, marks: Sequence[Highlight], colours: bool) -> str:
    start, end = excerpt(text, marks, EXCERPT_CHARACTERS)
    opening, closing = (BOLD, PLAIN) if colours else (MARK, MARK)
    parts, written = [], start
    for mark in marks:
        if mark.start >= written and mark.end <= end:
            parts += [text[written : mark.start], opening, text[mark.start : mark.end], closing]
            written = mark.end
    shown = "".join([*parts, text[written:end]])
    return _one_line(f"{'…' if start else ''}{shown}{'…' if end < len(text) else ''}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


TokensOf = Callable[[str], Iterable[Token]]
# Characters of a text to examine
MAX_CHARACTERS = 100_000
# Per text, since a common word may occur fifty thousand times
MAX_HIGHLIGHTS = 500


def shared_terms(query: tuple[Any, Any], document: tuple[Any, Any]) -> dict[int, float]:
    """(indices, values) of query and document -> the weight of each shared index."""
    common, of_query, of_document = np.intersect1d(
        np.asarray(query[0]), np.asarray(document[0]), return_indices=True
    )
    weights = (
        np.asarray(query[1], np.float64)[of_query]
        * np.asarray(document[1], np.float64)[of_document]
    )
    return {
        int(index): float(weight)
        for index, weight in zip(common, weights, strict=True)
        if weight > 0
    }


def highlights(text: str, terms: dict[int, float], tokens_of: TokensOf) -> list[Highlight]:
    """The places of the terms, in the order of the text. A stretch of several pieces has the sum of
    their weights.

    Only the `MAX_HIGHLIGHTS` heaviest stretches are returned.
    """
    text = text[:MAX_CHARACTERS]
    if not terms or not text:
        return []
    places = _characters(text)
    stretches = sorted(
        (places(token.start), places(token.stop), terms[token.id])
        for token in tokens_of(text)
        if token.id in terms and token.start is not None and token.stop is not None
    )
    merged = _merged(stretches)
    if len(merged) > MAX_HIGHLIGHTS:
        merged = sorted(nlargest(MAX_HIGHLIGHTS, merged, key=lambda stretch: stretch[2]))
    return [Highlight(start, end, text[start:end], weight) for start, end, weight in merged]


def _merged(stretches: Iterable[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Join sorted (start, end, weight) that touch or overlap."""
    merged: list[tuple[int, int, float]] = []
    for start, end, weight in stretches:
        if merged and start <= merged[-1][1]:
            last_start, last_end, last_weight = merged[-1]
            merged[-1] = (last_start, max(end, last_end), last_weight + weight)
        else:
            merged.append((start, end, weight))
    return merged


def _characters(text: str) -> Callable[[int], int]:
    """Convert places in UTF-8 to places in characters."""
    if text.isascii():
        return lambda place: place
    widths = [len(character.encode()) for character in text]
    begins = [0, *accumulate(widths)]
    return lambda place: bisect_right(begins, place) - 1


def excerpt(text: str, marks: Sequence[Highlight], width: int) -> tuple[int, int]:
    """(start, end) of the `width` characters with the largest weight, at borders of words."""
    if len(text) <= width:
        return 0, len(text)
    if not marks:
        return 0, _word_end(text, width)
    # The window that begins with a mark: its first mark's start and its last mark's end
    first, last, best_weight = marks[0].start, marks[0].end, -1.0
    for mark in marks:
        within = [
            other
            for other in marks
            if mark.start <= other.start and other.end <= mark.start + width
        ]
        weight = sum(other.weight for other in within)
        if weight > best_weight:
            first = mark.start
            last = max((other.end for other in within), default=mark.end)
            best_weight = weight
    # Include some words before, if the last term still fits
    lead = max(0, min(width // 8, (width - (last - first)) // 2))
    start = max(0, min(first - lead, len(text) - width))
    if start:
        # Begin after a space; without one, at the first mark
        start = text.find(" ", start, first) + 1 or first
    return start, _word_end(text, min(len(text), start + width), last)


def _word_end(text: str, end: int, least: int = 0) -> int:
    """A border of a word a little before `end`, but not before `least`."""
    if end >= len(text):
        return len(text)
    border = text.rfind(" ", max(0, end - 20, least), end)
    return border if border > 0 else end
