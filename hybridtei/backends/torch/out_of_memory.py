"""Which errors mean that memory does not suffice; and a batch that does not fit, split in halves down to single sequences.

What fits is computed whatever else was in the batch; only a sequence that does not fit by itself fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hybridtei.backends.torch.parts import part
from hybridtei.batch import PackedBatch
from hybridtei.errors import BackendError, PartlyFailed
from hybridtei.outputs import HeadOutputs

log = logging.getLogger(__name__)


class TooLarge(Exception):
    """A batch needs more memory than there is."""


def split_on_oom(run: Callable[[PackedBatch], HeadOutputs], batch: PackedBatch, make_room: Callable[[], None]) -> HeadOutputs:
    """`run`, of a batch or of parts of it. `make_room`: called after each that was too large, before the next is tried.

    Raises PartlyFailed if sequences are too large by themselves, BackendError if all are; and whatever else `run` raises.
    """
    done: list[tuple[range, HeadOutputs]] = []
    refused: list[str] = []
    waiting = [range(len(batch))]
    while waiting:
        rows = waiting.pop()
        piece = batch if len(rows) == len(batch) else part(batch, rows.start, rows.stop)
        outputs, why = _attempt(run, piece)
        if outputs is not None:
            done.append((rows, outputs))
            continue
        make_room()
        if len(rows) == 1:
            refused.append(f"a sequence of {len(piece.input_ids)} tokens does not fit into memory: {why}")
            continue
        middle = (rows.start + rows.stop) // 2
        log.warning("a pass of %d sequences, %d tokens, is tried again in halves: %s", len(rows), len(piece.input_ids), why)
        waiting += [range(middle, rows.stop), range(rows.start, middle)]  # the first half is popped first
    if refused and not done:
        raise BackendError(refused[0])
    joined = HeadOutputs.concat([outputs for _, outputs in done])
    if refused:
        raise PartlyFailed(refused[0], [row for rows, _ in done for row in rows], joined)
    return joined


def _attempt(run: Callable[[PackedBatch], HeadOutputs], batch: PackedBatch) -> tuple[HeadOutputs | None, str]:
    """(outputs, or None and why). What a failed pass allocated hangs on its exception: it has to be gone on return."""
    try:
        return run(batch), ""
    except TooLarge as error:
        return None, str(error)


# What torch and its libraries say where memory is short, when they do not raise OutOfMemoryError.
OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory, of the device or of the host, did not suffice."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
