"""Sizes that small batches are padded to, so that a recorded pass can be played again: a calculation, without torch.

A recording fixes every shape: tokens, sequences, and the longest sequence that attention is told of. What a batch lacks of its
bucket is filled with sequences of their own behind the real ones, which no text sees, and with empty ones behind these. So the
rows of a batch are the first of what comes out, and its offsets the first of the bucket's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridtei.batch import Offsets, PackedBatch

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Attention starts a block for each sequence and head, empty ones too: a few sizes keep those few.
SEQUENCES = (4, 16, 64, 256, 1024)
LONGEST = (128, 512, 2048)
# A layer of so many weights times tokens takes a large GPU about as long as a host takes to launch it (some 0.1 ms at some
# 0.7 PFLOP/s): with more, launches hide behind arithmetic, and padding would only add to that. An estimate.
HIDDEN_LAUNCHES = 35_000_000_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """So many tokens, sequences (real ones, those of padding, empty ones), and at most so many tokens in each."""

    tokens: int
    sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The buckets of a model. `tokens`: of the largest; `longest`: tokens of a text at most."""

    tokens: int
    longest: int

    def of(self, batch: PackedBatch) -> Bucket | None:
        """The smallest bucket a batch fits into, or None: too large, or with tokens that are not to be seen."""
        count = len(batch.input_ids)
        tokens = _least(TOKENS, count)
        if tokens is None or tokens > self.tokens or batch.unseen is not None:
            return None
        most = _least((*(size for size in LONGEST if size < self.longest), self.longest), batch.max_seqlen)
        if most is None:
            return None
        longest = min(most, tokens)
        sequences = _least(SEQUENCES, len(batch) + -(-(tokens - count) // longest))
        return None if sequences is None else Bucket(tokens, sequences, longest)


def sizes(weights_of_layer: int, longest: int) -> Sizes:
    """The buckets for a model by the weights of one of its layers: the heavier it is, the fewer tokens hide its launches."""
    bound = HIDDEN_LAUNCHES // max(weights_of_layer, 1)
    return Sizes(max((size for size in TOKENS if size <= bound), default=0), longest)


def padded(batch: PackedBatch, bucket: Bucket) -> PackedBatch:
    """A batch filled up to its bucket; the padding repeats its first token, which is a legal one at a legal position."""
    count = len(batch.input_ids)
    fill, types, adapters = bucket.tokens - count, batch.token_type_ids, batch.adapter_ids
    return replace(
        batch,
        input_ids=_filled(batch.input_ids, fill),
        position_ids=_filled(batch.position_ids, fill),
        token_type_ids=None if types is None else _filled(types, fill),
        cu_seqlens=_offsets(batch.cu_seqlens, bucket),
        adapter_ids=None if adapters is None else _filled(adapters, fill),
    )


def _offsets(cu_seqlens: Offsets, bucket: Bucket) -> Offsets:
    lacking = bucket.sequences + 1 - len(cu_seqlens)
    behind = cu_seqlens[-1] + bucket.longest * np.arange(1, lacking + 1)
    return np.concatenate([cu_seqlens, np.minimum(behind, bucket.tokens)])


def _filled(values: Offsets, fill: int) -> Offsets:
    return np.concatenate([values, np.full(fill, values[0])])


def _least(levels: tuple[int, ...], needed: int) -> int | None:
    return next((level for level in levels if level >= needed), None)
