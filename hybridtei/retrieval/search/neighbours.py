"""Passages: each hit's chunk with the chunks beside it in the same version of its document.

Ranges of hits that overlap are one passage, which stands at the best of them. A chunk may repeat
the end of the one before it; `start`, its first character, says how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from hybridtei.retrieval.documents import of_documents
from hybridtei.retrieval.ingest.chunking import (
    CHUNK,
    DIGEST,
    DOCUMENT_ID,
    SETTINGS,
    SOURCE,
    START,
)
from hybridtei.retrieval.search.explain import TokensOf
from hybridtei.retrieval.search.options import Neighbours
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.own import text_of
from hybridtei.retrieval.store.query import Filter, Range

# Keys of a version of a document, and all that a passage needs besides the text
VERSION = (SOURCE, DOCUMENT_ID, DIGEST, SETTINGS)
KEYS = (*VERSION, CHUNK, START)
Payload = Mapping[str, Any]
# A version of a document, and the number of a chunk
Key = tuple[tuple[str, ...], int]


def keys_of(payloads: Iterable[Payload]) -> dict[int, Key]:
    """The keys of hits that are chunks, by their places."""
    return {
        place: _key(payload)
        for place, payload in enumerate(payloads)
        # Other programs write what they like under this key
        if type(payload.get(CHUNK)) is int
    }


def filter_beside(keys: Iterable[Key], neighbours: Neighbours) -> Filter:
    """The chunks that the passages of these hits may have."""
    documents = []
    for (source, name, *_), number in keys:
        places = neighbours.around(number)
        near = Filter(key=CHUNK, range=Range(gte=places[0], lte=places[-1]))
        documents.append(of_documents(source, [name], near))
    return Filter(should=documents)


def passages(
    keys: Mapping[int, Key],
    points: Iterable[Stored],
    neighbours: Neighbours,
    field: str,
    tokens_of: TokensOf,
) -> dict[int, str]:
    """{place of a hit: its passage, or "" if a better hit has it}. `points`: of `filter_beside`."""
    chunks = {_key(point.payload): point.payload for point in points}

    @cache
    def size(key: Key) -> int:
        if neighbours.tokens is None:
            return 0
        return len(list(tokens_of(text_of(chunks[key], field))))

    # The keys of each passage, and the places of its hits
    merged: list[tuple[list[Key], list[int]]] = []
    ranges = [
        (_range(key, chunks, neighbours, size), place)
        for place, key in keys.items()
        if key in chunks
    ]
    for numbers, place in sorted(ranges):
        if not merged or numbers[0] > merged[-1][0][-1]:
            merged.append(([], []))
        merged[-1][0].extend(key for key in numbers if key not in merged[-1][0])
        merged[-1][1].append(place)
    texts: dict[int, str] = {}
    for numbers, places in merged:
        texts |= dict.fromkeys(places, "")
        texts[min(places)] = _joined([chunks[key] for key in numbers], field)
    return texts


def _key(payload: Payload) -> Key:
    return tuple(str(payload.get(key, "")) for key in VERSION), payload[CHUNK]


def _range(
    key: Key, chunks: Container[Key], neighbours: Neighbours, size: Callable[[Key], int]
) -> list[Key]:
    """The chunks of a hit's passage: from the nearest on, without a gap, as many as fit."""
    version, number = key
    keys, left = [key], (neighbours.tokens or math.inf) - size(key)
    for place in sorted(neighbours.around(number), key=lambda place: abs(place - number)):
        new = version, place
        is_next = place in (keys[0][1] - 1, keys[-1][1] + 1)
        if is_next and new in chunks and size(new) <= left:
            left -= size(new)
            keys = sorted([*keys, new])
    return keys


def _joined(chunks: Sequence[Payload], field: str) -> str:
    """The text of chunks that follow each other, without what they repeat."""
    text, end = "", -1
    for chunk in chunks:
        part, start = text_of(chunk, field), chunk.get(START)
        if type(start) is not int:
            start = end + 1
        # The blanks between two chunks are not stored
        if start > end:
            text, end = f"{text}\n", start
        text += part[end - start :]
        end = start + len(part)
    return text[1:]
