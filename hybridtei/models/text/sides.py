"""Queries and documents of late-interaction models -> encodings: with the marker of their side, and queries expanded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybridtei.batch import Encoding, LocatedEncoding
from hybridtei.models.checkpoint.late import Side
from hybridtei.models.text.reader import Input, Laid, TextReader
from hybridtei.models.text.tokenizer import Direction


def read_side(
    reader: TextReader,
    inputs: Sequence[Input],
    side: Side,
    *,
    truncate: bool,
    direction: Direction | None,
    allow_empty: bool = False,
) -> list[Encoding]:
    """Return one encoding an input, in order, with the side's marker and expansion. Raises the errors of `TextReader.read`."""
    limited, longest = _limited(reader, side)
    encodings = limited.read(inputs, truncate=truncate, direction=direction, allow_empty=allow_empty)
    leading = reader.tokenizer.leading_specials
    return [_widened(_marked(encoding, side, leading), side, longest) for encoding in encodings]


def locate_side(
    reader: TextReader,
    texts: Sequence[str],
    side: Side,
    *,
    truncate: bool,
    direction: Direction | None,
    times: int = 1,
    allow_empty: bool = False,
) -> list[LocatedEncoding]:
    """Like `read_side`, with each token's place in the text, for a side without expansion. `times`: as for `locate`."""
    limited, _ = _limited(reader, side)
    encodings = limited.locate(
        texts,
        truncate=truncate,
        direction=direction,
        prompt=side.text,
        adapter=limited.prompts.adapter(None),
        times=times,
        allow_empty=allow_empty,
    )
    return [_marked(encoding, side, reader.tokenizer.leading_specials) for encoding in encodings]


def _limited(reader: TextReader, side: Side) -> tuple[TextReader, int]:
    """Return a reader that leaves room for the side's marker, and the side's longest input."""
    longest = min(reader.max_input_length, side.length or reader.max_input_length)
    if side.expansion is not None:
        floor = min(side.expansion.length, reader.max_input_length)
        longest = floor if side.expansion.fixed else max(longest, floor)
    room = longest - (side.marker is not None)
    prompts = replace(reader.prompts, default=side.text or None)
    return replace(reader, max_input_length=room, prompts=prompts), longest


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


def _widened(encoding: Encoding, side: Side, longest: int) -> Encoding:
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
