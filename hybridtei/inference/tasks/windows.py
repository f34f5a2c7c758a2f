"""Reads texts that are longer than the model's input in windows. Each window becomes an encoding. A
reranker takes a document's best window; an embedding is made from all windows of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridtei.batch import Characters, Encoding, Ragged, WindowEncoding, WindowPlace
from hybridtei.errors import RequestError
from hybridtei.models.text.reader import TextReader
from hybridtei.outputs import HeadOutputs, max_weights

# Tokens that a part of a text may have more alone than within the text
SPARE_TOKENS = 2
# Tokens of a document beside a long query, below which it is cut instead
LEAST_WINDOW = 16
# Windows in memory at a time. The next ones are read once these have their scores.
WINDOWS_AT_ONCE = 64
BEGINNING = WindowPlace()
# Of a chunk's texts, whose token vectors take some 60 MB
MAX_CHUNK_CHARACTERS = 65_536
# Of a token, about
TOKEN_CHARACTERS = 4
Read = Callable[[Sequence[str]], list[Encoding]]


def in_windows(
    reader: TextReader,
    texts: Sequence[str],
    empty: int,
    longest: int,
    read: Read,
    *,
    limit: int,
    truncate: bool,
    first: int = 0,
    start: WindowPlace = BEGINNING,
) -> list[Encoding]:
    """Read texts by `read` from `start` on, long ones in at most `limit` windows: about
    `WINDOWS_AT_ONCE` windows, of which the last one knows where the others begin. `empty`: the
    tokens of an empty text, with the query if the model reads both together; `longest`: the most
    tokens. `truncate`: as for `TextReader.windows`. `first`: the place of the first text in its
    chunk. The encodings before those of the texts are the query's. Raises RequestError."""
    room = longest - empty - SPARE_TOKENS
    if limit < 2 or room < LEAST_WINDOW:
        return read(texts)
    at_once = max(WINDOWS_AT_ONCE, len(texts))
    # Each window's place, and the character after it
    places: list[WindowPlace] = []
    ends: list[int] = []
    rest: WindowPlace | None = None
    for place in range(start.document, len(texts)):
        before, begin = 0, 0
        if place == start.document:
            before, begin = start.windows, start.character
        windows = reader.windows(texts[place], room, limit - before, truncate=truncate, begin=begin)
        for number, (begin, end) in enumerate(windows, before):
            if len(places) == at_once:
                rest = WindowPlace(place, begin, number)
                break
            places.append(WindowPlace(place, begin, number))
            ends.append(end)
        if rest is not None:
            break
    try:
        encodings = read(
            [
                texts[place.document][place.character : end]
                for place, end in zip(places, ends, strict=True)
            ]
        )
    except RequestError as error:
        if error.place is not None:
            error.place = first + places[error.place].document
        raise
    of_query = len(encodings) - len(places)
    for row, ((document, begin, number), end) in enumerate(
        zip(places, ends, strict=True), of_query
    ):
        encoding = encodings[row]
        size = len(texts[document])
        extent: Characters | None = None
        if encoding.extent is not None:
            extent = (0, begin + encoding.extent[1])
        elif number == limit - 1 and end < size:
            extent = (0, end)
        encodings[row] = WindowEncoding(
            input_ids=encoding.input_ids,
            token_type_ids=encoding.token_type_ids,
            adapter=encoding.adapter,
            route=encoding.route,
            extent=extent,
            document=first + document,
            characters=(begin, end),
            is_whole=(begin, end) == (0, size),
            rest=rest if row == len(encodings) - 1 else None,
        )
    return encodings


def windows_of(texts: Sequence[Any], longest: int, limit: int) -> int:
    """About the number of windows in which texts (or lists of ids) are read. `longest`: the most
    tokens of one; `limit`: the most windows of a text."""
    return sum(min(limit, 1 + len(text) // (longest * TOKEN_CHARACTERS)) for text in texts)


def joined(encodings: Sequence[Encoding], outputs: HeadOutputs) -> HeadOutputs:
    """Join the outputs of each text's windows. A text that was read whole keeps its own.

    Dense vectors become their mean, weighted by the windows' tokens; the rows of lexical weights
    and of multi-vectors follow one another; of SPLADE's weights the largest counts.
    """
    # No window has a number below 0
    texts = [getattr(encoding, "document", -1 - row) for row, encoding in enumerate(encodings)]
    begins = np.flatnonzero(np.diff(texts, prepend=-1 - len(texts)))
    bounds = np.append(begins, len(texts))
    dense, splade = outputs.dense, outputs.splade
    if dense is not None:
        # In float64 the product is exact, so the mean of a single row is that row
        tokens = np.array([len(encoding) for encoding in encodings], dtype=np.float64)[:, None]
        sums = np.add.reduceat(dense * tokens, begins)
        dense = (sums / np.add.reduceat(tokens, begins)).astype(np.float32)
    if splade is not None:
        indptr = splade.indptr[bounds]
        splade = max_weights(splade.indices, splade.values, indptr, (), splade.width)
    end_to_end: dict[str, Any] = {}
    for name in ("token_weights", "multivector"):
        rows = getattr(outputs, name)
        if rows is not None:
            end_to_end[name] = Ragged(rows.values, rows.offsets[bounds])
    return HeadOutputs(dense=dense, splade=splade, **end_to_end)
