"""Queries and documents of late-interaction models -> encodings: with the marker of their side, and queries expanded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridtei.batch import LocatedEncoding
from hybridtei.models.checkpoint.late import Side
from hybridtei.models.text.reader import Laid, TextReader


@dataclass(frozen=True, slots=True, kw_only=True)
class SideReader(TextReader):
    """A reader that leaves room for the side's marker. `longest`: the side's longest input."""

    side: Side
    longest: int

    def _finished(self, encoding: Laid, adapter: int = 0) -> Laid:
        encoding = TextReader._finished(self, encoding, adapter)
        return _widened(_marked(encoding, self.side, self.tokenizer.leading_specials), self.side, self.longest)


def of_side(reader: TextReader, side: Side) -> SideReader:
    """Return a reader of the side's inputs. It locates tokens only on a side without expansion."""
    longest = min(reader.max_input_length, side.length or reader.max_input_length)
    if side.expansion is not None:
        floor = min(side.expansion.length, reader.max_input_length)
        longest = floor if side.expansion.fixed else max(longest, floor)
    return SideReader(
        tokenizer=reader.tokenizer,
        prompts=replace(reader.prompts, default=side.text or None),
        max_input_length=longest - (side.marker is not None),
        vocab_size=reader.vocab_size,
        skipped=reader.skipped,
        side=side,
        longest=longest,
    )


def _marked(encoding: Laid, side: Side, place: int) -> Laid:
    if side.marker is None:
        return encoding
    types = encoding.token_type_ids
    marked = replace(
        encoding,
        input_ids=np.insert(encoding.input_ids, place, side.marker),
        token_type_ids=None if types is None else np.insert(types, place, 0),
    )
    if not isinstance(marked, LocatedEncoding):
        return marked
    return replace(
        marked, offsets=np.insert(marked.offsets, place, 0, axis=0), special=np.insert(marked.special, place, values=True)
    )


def _widened(encoding: Laid, side: Side, longest: int) -> Laid:
    expansion = side.expansion
    missing = 0 if expansion is None else min(expansion.length, longest) - len(encoding)
    if expansion is None or missing <= 0:
        return encoding
    types = encoding.token_type_ids
    return replace(
        encoding,
        input_ids=np.concatenate([encoding.input_ids, np.full(missing, expansion.token_id, dtype=np.int64)]),
        token_type_ids=None if types is None else np.concatenate([types, np.zeros(missing, dtype=np.int64)]),
        unseen=0 if expansion.attend else missing,
    )
