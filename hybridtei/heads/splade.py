"""SPLADE: a weight for each vocabulary entry, from the masked-language-model head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hybridtei.trunk.layout import PackedLayout

SLICE_TOKENS = 2048  # logits of a slice at v = 30k: 250 MB in float32


def splade(hidden: Tensor, layout: PackedLayout, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """max over tokens of log(1 + relu(logit)): float[t, h] -> float32[n, v], all >= 0. Special tokens take part.

    Takes max before log1p(relu): both rise monotonically, so the answer is the same and that work is n*v, not t*v.
    Logits of a 16k-token batch at v=30k are 2 GB in float32, so whole sequences go through in slices.
    Source: SPLADE v2, Formal et al. 2021 (max pooling).
    """
    strongest = [
        part.amax(0)
        for start, stop, lengths in _slices(layout.lengths)
        for part in torch.split(logits_of(hidden[start:stop]), lengths)
    ]
    return torch.log1p(torch.relu(torch.stack(strongest).float()))


def _slices(lengths: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """(first row, last row + 1, lengths) of runs of whole sequences of at most SLICE_TOKENS, or of one longer sequence."""
    start, run = 0, list[int]()
    for length in lengths:
        if run and sum(run) + length > SLICE_TOKENS:
            yield start, start + sum(run), run
            start, run = start + sum(run), []
        run.append(length)
    if run:
        yield start, start + sum(run), run
