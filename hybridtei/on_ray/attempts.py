"""Blocks that end the process that embeds them: the text at fault is found and goes into quarantine, and the ingest goes on.

Ray gives a dead actor's block to the next actor, which would die of it too. So what is begun is noted where it outlives the
actor; a block that was begun twice and not ended is embedded text by text, and a text in hand at a death is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hybridtei.errors import BackendError
from hybridtei.ingest.embedders import embed_each
from hybridtei.on_ray.blocks import Vectors
from hybridtei.outputs import Embeddings

WHOLE_TRIES = 2  # a death may have another cause than the texts
MAX_TRIES = 10  # of a block; at the last, nothing is embedded, so that it ends
FATAL = "the process that embedded it ended"
Block = tuple[int, int]  # reader and number


class Notes(Protocol):
    """See `Attempts`."""

    def begin(self, block: Block) -> tuple[int, list[int]]: ...

    def note(self, block: Block, place: int) -> None: ...

    def end(self, block: Block) -> None: ...


@dataclass
class _Begun:
    tries: int = 0
    in_hand: int | None = None
    fatal: set[int] = field(default_factory=set)


class Attempts:
    """Blocks that were begun and not ended."""

    def __init__(self) -> None:
        self._blocks: dict[Block, _Begun] = {}

    def begin(self, block: Block) -> tuple[int, list[int]]:
        """(how often it was begun, this time included; places of the texts in hand when it was not ended)."""
        begun = self._blocks.setdefault(block, _Begun())
        begun.tries += 1
        if begun.in_hand is not None:
            begun.fatal.add(begun.in_hand)
            begun.in_hand = None
        return begun.tries, sorted(begun.fatal)

    def note(self, block: Block, place: int) -> None:
        """This text is in hand now."""
        self._blocks[block].in_hand = place

    def end(self, block: Block) -> None:
        """It is embedded."""
        self._blocks.pop(block, None)


def embed_block(notes: Notes, block: Block, embed: Callable[[Sequence[str]], Embeddings], texts: Sequence[str]) -> Vectors:
    """Rows, and for each text why it has none, or None. Raises BackendError where no text of several could be embedded."""
    tries, fatal = notes.begin(block)
    if tries <= WHOLE_TRIES:
        found = embed_each(embed, texts)
    elif tries < MAX_TRIES:
        found = _one_by_one(notes, block, embed, texts, frozenset(fatal))
    else:
        found = Embeddings(), [f"{FATAL}, {tries - 1} times"] * len(texts)
    notes.end(block)
    return found


def _one_by_one(
    notes: Notes, block: Block, embed: Callable[[Sequence[str]], Embeddings], texts: Sequence[str], fatal: frozenset[int]
) -> Vectors:
    parts: list[Embeddings] = []
    reasons: list[str | None] = []
    for place, text in enumerate(texts):
        if place in fatal:
            reasons.append(FATAL)
            continue
        notes.note(block, place)
        part, (reason,) = embed_each(embed, [text])
        reasons.append(reason)
        if reason is None:
            parts.append(part)
    return Embeddings.concat(parts), reasons


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
