"""A backend without a model: its vectors are arithmetic on token ids and positions. For tests.

Every number is a multiple of 2**-24, so sums are exact and a text's answer is the same to the last
bit beside any neighbours. `fail_on` makes a batch that holds this token id fail; `nan_on` makes the
outputs of texts with this token id NaN; `gate` is called with each batch before it is computed, and
may wait (to hold a pass), sleep (to be slow), note what it sees, or raise.
"""

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hybridtei.batch import Head, PackedBatch, Padding, Ragged, kept_tokens
from hybridtei.errors import BackendError
from hybridtei.inference.backends.base import Backend
from hybridtei.outputs import HeadOutputs, SparseVectors
from hybridtei.system.machine import LaneKind

Gate = Callable[[PackedBatch], object]
STEPS = 2**24
# Seconds after which what should end at once has hung
HANG = 120


class FakeBackend(Backend):
    """See `backends.base.Backend`; gives whatever outputs `spec` has."""

    name = "fake"
    dtype = "float32"

    def __init__(
        self,
        spec,
        *,
        lanes=1,
        padding=Padding.NONE,
        busy_tokens=256,
        fail_on=None,
        nan_on=None,
        gate=None,
    ):
        super().__init__(spec)
        self.lanes = (LaneKind.BULK,) * lanes if isinstance(lanes, int) else lanes
        self.padding = padding
        self.busy_tokens = busy_tokens
        self.fail_on = fail_on
        self.nan_on = nan_on
        self.gate = gate

    def forward(self, batch, *, use_all_cores=False):
        """See `Backend.forward`. Counts a pass that fails, too."""
        self.count()
        if self.gate is not None:
            self.gate(batch)
        if self.fail_on is not None and (batch.input_ids == self.fail_on).any():
            raise BackendError(f"the batch holds the id {self.fail_on}")
        wanted, spec = batch.heads, self.spec
        lexical = Head.SPARSE in wanted and not spec.is_splade
        outputs = HeadOutputs(
            dense=_mean(_states(batch, spec.dense_width), batch) if Head.DENSE in wanted else None,
            token_weights=Ragged(_states(batch, 1)[:, 0].clip(0), batch.cu_seqlens)
            if lexical
            else None,
            splade=_splade(batch, spec.vocab_size)
            if Head.SPARSE in wanted and spec.is_splade
            else None,
            multivector=self._multivector(batch) if Head.MULTIVECTOR in wanted else None,
            tokens=Ragged(_states(batch, spec.hidden_size), batch.cu_seqlens)
            if Head.TOKENS in wanted
            else None,
            scores=_mean(_states(batch, len(spec.labels)), batch)
            if Head.SCORES in wanted
            else None,
            tags=Ragged(_states(batch, len(spec.labels)), batch.cu_seqlens)
            if Head.TAGS in wanted
            else None,
        )
        if self.nan_on is not None:
            _spoil(outputs, batch, self.nan_on)
        return outputs

    def _multivector(self, batch):
        special = np.array(sorted(self.spec.removed_ids), dtype=np.int64)
        kept, offsets = kept_tokens(
            self.spec.multivector.drop, batch.input_ids, batch.cu_seqlens, special
        )
        return Ragged(_states(batch, self.spec.multivector.width)[kept], offsets)


def _spoil(outputs, batch, token_id):
    """Make the outputs of texts with this token id NaN."""
    for row, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        if token_id in batch.input_ids[start:end]:
            for name in ("dense", "scores", "token_weights", "tokens", "multivector", "tags"):
                column = getattr(outputs, name)
                if column is not None:
                    values = column[row] if isinstance(column, np.ndarray) else column.row(row)
                    values[...] = np.nan
            if outputs.splade is not None:
                outputs.splade.row(row)[1][...] = np.nan


def _states(batch, width):
    """float32[t, width] in [-0.5, 0.5): a multiplicative hash of token id, position, adapter and
    column."""
    places = (
        batch.position_ids
        if batch.adapter_ids is None
        else batch.position_ids + 1_000_003 * batch.adapter_ids
    )
    of_token = (batch.input_ids + 1).astype(np.uint64) * np.uint64(2654435761) + places.astype(
        np.uint64
    )
    of_column = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (of_token[:, None] + np.uint64(1)) * (of_column[None, :] | np.uint64(1))
    return ((mixed >> np.uint64(40)) / STEPS - 0.5).astype(np.float32)


def _mean(states, batch):
    sums = np.add.reduceat(states, batch.cu_seqlens[:-1], axis=0, dtype=np.float64)
    return (sums / batch.lengths[:, None]).astype(np.float32)


def _splade(batch, vocab_size):
    """Each id of a text, weighted; and its successor in the vocabulary, which stands for
    expansion."""
    rows = np.zeros((len(batch), vocab_size), dtype=np.float32)
    row = np.repeat(np.arange(len(batch)), batch.lengths)
    weights = _states(batch, 2) + np.float32(0.5)
    for column, ids in enumerate((batch.input_ids, (batch.input_ids + 1) % vocab_size)):
        np.maximum.at(rows, (row, ids), weights[:, column])
    return SparseVectors.from_dense(rows)


class Held:
    """A gate that holds every pass until it is opened, and notes what comes by."""

    def __init__(self):
        self.seen = []
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, batch):
        self.seen.append(batch)
        self.entered.release()
        assert self._open.wait(HANG)

    def open(self):
        self._open.set()

    async def someone_waits(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=HANG)
