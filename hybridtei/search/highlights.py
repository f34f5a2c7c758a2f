"""Why a document was found: the terms it shares with the query, what each weighs, and where they stand in its text.

Knows no store. A term's weight is the product of its two sparse weights, the query's and the document's: what it adds to the
sparse score, a collection's idf aside. Sparse dimensions are pieces of words (`aero`, `##foil`), so pieces that touch are shown
as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from typing import Any

import numpy as np

from hybridtei.search.options import Highlight
from hybridtei.text.tokenizer import Token

TokensOf = Callable[[str], Sequence[Token]]
MAX_CHARACTERS = 100_000  # of a text that is looked through
MAX_HIGHLIGHTS = 500  # of a text: a common word may stand in it fifty thousand times


def shared_terms(query: tuple[Any, Any], document: tuple[Any, Any]) -> dict[int, float]:
    """(indices, values) of both -> weight of each index that both have."""
    common, of_query, of_document = np.intersect1d(np.asarray(query[0]), np.asarray(document[0]), return_indices=True)
    weights = np.asarray(query[1], np.float64)[of_query] * np.asarray(document[1], np.float64)[of_document]
    return {int(index): float(weight) for index, weight in zip(common, weights, strict=True) if weight > 0}


def highlights(text: str, terms: dict[int, float], tokens_of: TokensOf) -> list[Highlight]:
    """Where the terms stand, in the order of the text. A stretch of several pieces weighs as much as they do together.

    Of more than `MAX_HIGHLIGHTS` stretches the heaviest are given.
    """
    text = text[:MAX_CHARACTERS]
    if not terms or not text:
        return []
    places = _characters(text)
    found = [
        (places(token.start), places(token.stop), terms[token.id])
        for token in tokens_of(text)
        if token.id in terms and token.start is not None and token.stop is not None
    ]
    merged = _merged(sorted(found))
    if len(merged) > MAX_HIGHLIGHTS:
        merged = sorted(nlargest(MAX_HIGHLIGHTS, merged, key=lambda stretch: stretch[2]))
    return [Highlight(start, end, text[start:end], weight) for start, end, weight in merged]


def _merged(found: Iterable[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    merged: list[tuple[int, int, float]] = []
    for start, end, weight in found:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2] + weight)
        else:
            merged.append((start, end, weight))
    return merged


def _characters(text: str) -> Callable[[int], int]:
    """From places in UTF-8 to places in the text."""
    if text.isascii():
        return lambda place: place
    begins = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
    return lambda place: bisect_right(begins, place) - 1


def excerpt(text: str, found: Sequence[Highlight], width: int) -> tuple[int, int]:
    """(start, end) of the `width` characters that hold most weight, on borders of words."""
    if len(text) <= width:
        return 0, len(text)
    if not found:
        return 0, _word_end(text, width)
    best, last, most = found[0].start, found[0].end, -1.0
    for one in found:
        within = [other for other in found if one.start <= other.start and other.end <= one.start + width]
        weight = sum(other.weight for other in within)
        if weight > most:
            best, last, most = one.start, max((other.end for other in within), default=one.end), weight
    lead = max(0, min(width // 8, (width - (last - best)) // 2))  # some words before, if the last term still fits
    start = max(0, min(best - lead, len(text) - width))
    if start:
        start = text.find(" ", start, best) + 1 or best
    return start, _word_end(text, min(len(text), start + width), last)


def _word_end(text: str, end: int, least: int = 0) -> int:
    """A border of a word a little before `end`, and not before `least`."""
    if end >= len(text):
        return len(text)
    border = text.rfind(" ", max(0, end - 20, least), end)
    return border if border > 0 else end
