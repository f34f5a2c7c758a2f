"""A packed batch taken apart: a run of whole sequences of it is a batch again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridtei.batch import PackedBatch


def part(batch: PackedBatch, first: int, end: int) -> PackedBatch:
    """Sequences `first` to `end - 1`, as views."""
    start, stop = batch.cu_seqlens[first], batch.cu_seqlens[end]
    types, adapters, unseen = batch.token_type_ids, batch.adapter_ids, batch.unseen
    return replace(
        batch,
        input_ids=batch.input_ids[start:stop],
        position_ids=batch.position_ids[start:stop],
        token_type_ids=None if types is None else types[start:stop],
        adapter_ids=None if adapters is None else adapters[start:stop],
        cu_seqlens=batch.cu_seqlens[first : end + 1] - start,
        unseen=None if unseen is None else unseen[first:end],
    )


def each(batch: PackedBatch) -> Iterator[PackedBatch]:
    """Each sequence of a batch as a batch of its own."""
    return (part(batch, place, place + 1) for place in range(len(batch)))
