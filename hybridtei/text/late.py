"""Queries and documents as a late-interaction model reads them: marked, cut to their side's length, queries widened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybridtei.batch import Encoding
from hybridtei.checkpoint.late import Side
from hybridtei.text.reader import Input, TextReader
from hybridtei.text.tokenizer import Direction


def read_side(
    reader: TextReader, inputs: Sequence[Input], side: Side, *, truncate: bool, direction: Direction, allow_empty: bool = False
) -> list[Encoding]:
    """One encoding an input, in order. Raises RequestError as `TextReader.read` does."""
    longest = min(reader.max_input_length, side.length or reader.max_input_length)
    if side.expansion is not None:
        floor = min(side.expansion.length, reader.max_input_length)
        longest = floor if side.expansion.fixed else max(longest, floor)
    room = longest - (side.marker is not None)
    prompts = replace(reader.prompts, default=side.text or None)
    limited = replace(reader, max_input_length=room, prompts=prompts)
    encodings = limited.read(inputs, truncate=truncate, direction=direction, allow_empty=allow_empty)
    leading = reader.tokenizer.leading_specials
    return [_widened(_marked(encoding, side, leading), side, longest) for encoding in encodings]


def _marked(encoding: Encoding, side: Side, place: int) -> Encoding:
    if side.marker is None:
        return encoding
    types = encoding.token_type_ids
    return Encoding(np.insert(encoding.input_ids, place, side.marker), None if types is None else np.insert(types, place, 0))


def _widened(encoding: Encoding, side: Side, longest: int) -> Encoding:
    expansion = side.expansion
    missing = 0 if expansion is None else min(expansion.length, longest) - len(encoding)
    if expansion is None or missing <= 0:
        return encoding
    types = encoding.token_type_ids
    return Encoding(
        np.concatenate([encoding.input_ids, np.full(missing, expansion.token_id, dtype=np.int64)]),
        None if types is None else np.concatenate([types, np.zeros(missing, dtype=np.int64)]),
        unseen=0 if expansion.attend else missing,
    )
