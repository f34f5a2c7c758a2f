"""What a graph is given for a batch: texts end to end, or padded to a rectangle, as its inputs say.

Sizes may be rounded up for a runtime that makes its kernels for a shape. What fills them is computed, and not read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import PackedBatch, Padding, pad, seen_mask
from hybridtei.outputs import Floats

Feed = dict[str, NDArray[np.int64]]
Sizes = tuple[int, int, int]  # tokens of a batch; rows and columns of the rectangle that attention has
ROWS = "rows"  # an input that only graphs of texts end to end have


def padding_of(inputs: frozenset[str]) -> Padding:
    """What a graph of these inputs pads."""
    return Padding.ATTENTION if ROWS in inputs else Padding.ALL


def end_to_end(
    batch: PackedBatch,
    inputs: frozenset[str],
    run: Callable[[Feed], Floats],
    grown: Callable[[Sizes], Sizes] = lambda sizes: sizes,
) -> Floats:
    """Hidden states float32[t, h] of a batch from a graph that takes its texts end to end.

    `inputs`: the names it takes. `grown`: sizes for which it is to be given more than there is.
    """
    tokens = len(batch.input_ids)
    all_tokens, n, longest = grown((tokens, len(batch), batch.max_seqlen))
    mask = np.zeros((n, longest), dtype=bool)
    mask[: len(batch)] = np.arange(longest) < batch.lengths[:, None]
    places = np.flatnonzero(mask)
    rows = np.zeros(mask.size, dtype=np.int64)
    rows[places] = np.arange(tokens)
    seen = mask.astype(np.int64)
    seen[: len(batch)] = seen_mask(mask[: len(batch)], batch)
    seen[len(batch) :, 0] = 1  # a row that may attend to nothing is not a number
    feed = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "places": places}
    if "token_type_ids" in inputs:
        types = batch.token_type_ids
        feed["token_type_ids"] = np.zeros(tokens, dtype=np.int64) if types is None else types
    if all_tokens > tokens:
        more = all_tokens - tokens
        feed = {name: np.concatenate([values, np.repeat(values[:1], more)]) for name, values in feed.items()}
    return run({**feed, ROWS: rows, "seen": seen})[:tokens]


def in_rectangle(batch: PackedBatch, inputs: frozenset[str], padding_id: int, run: Callable[[Feed], Floats]) -> Floats:
    """Hidden states float32[t, h] of a packed batch from a graph that takes a padded one. `inputs`: the names it takes."""
    input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, padding_id)
    feed: Feed = {"input_ids": input_ids, "attention_mask": seen_mask(mask, batch).astype(np.int64)}
    if "token_type_ids" in inputs:
        types = batch.token_type_ids
        feed["token_type_ids"] = np.zeros_like(input_ids) if types is None else pad(types, batch.cu_seqlens, 0)[0]
    return np.asarray(run(feed)[mask])
