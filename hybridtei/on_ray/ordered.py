"""Blocks that arrive in any order, given back in each reader's own: a document's last chunk must not be noted before its first.

Only what overtook others is held: at most what the workers had in hand while one of them was away.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

from hybridtei.errors import BackendError

T = TypeVar("T")


def in_order(arriving: Iterable[tuple[int, int, T]]) -> Generator[tuple[int, T]]:
    """(reader, number, block), numbers from 0 for each reader -> (reader, block) by number; a block that came before is left
    out. Raises BackendError at the end if one is missing."""
    following: dict[int, int] = {}
    waiting: dict[int, dict[int, T]] = {}
    for reader, number, block in arriving:
        held = waiting.setdefault(reader, {})
        if number >= following.setdefault(reader, 0):
            held.setdefault(number, block)
        while following[reader] in held:
            yield reader, held.pop(following[reader])
            following[reader] += 1
    missing = {reader: following[reader] for reader, held in waiting.items() if held}
    if missing:
        reader, number = next(iter(missing.items()))
        raise BackendError(f"Ray lost block {number} of reader {reader}: run the same command again to go on")
