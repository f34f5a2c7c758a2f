"""A device's memory: copies to it and back, how large a pass it has room for, and a batch that does not fit.

A copy of pageable memory makes the host wait. So a batch's integers travel as one array, and what heads give comes back, from
and to pinned memory. What was computed in half precision (vectors and states of tokens, nearly all the bytes there are) crosses
as that and becomes float32 on the host: half the bytes, the same numbers. On a CPU nothing is copied.

How large a pass may be is tried, from the largest down; what a sequence needs beyond its tokens (masks of plain attention) is
met by trying with the longest. A batch that is too large after all is split in halves down to single sequences: what fits is
computed whatever else was in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtei.batch import PackedBatch, part
from hybridtei.errors import BackendError, LoadError, PartlyFailed
from hybridtei.inference.backends.base import made_up
from hybridtei.outputs import HeadOutputs

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


def to_device(arrays: Mapping[str, NDArray[np.int64]], device: torch.device) -> dict[str, Tensor]:
    """Flat int64 arrays as tensors on a device; on a CPU they share memory."""
    if device.type == "cpu":
        return {name: torch.as_tensor(array) for name, array in arrays.items()}
    staged = torch.empty(sum(map(len, arrays.values())), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([*arrays.values()], out=staged.numpy())
    there = staged.to(device, non_blocking=True)  # torch keeps the pinned memory until it has been read
    return dict(zip(arrays, torch.split(there, [len(array) for array in arrays.values()]), strict=True))


def placed(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """An int64 array of any shape on a device; nobody waits for the copy."""
    return to_device({"": array.reshape(-1)}, device)[""].view(array.shape)


def start_copy(tensors: Mapping[str, Tensor], device: torch.device) -> Callable[[], Arrays]:
    """Begin to bring tensors to the host, floats as float32; the function that waits for them. Call it once."""
    if device.type == "cpu":
        return lambda: {name: _plain(tensor).numpy() for name, tensor in tensors.items()}
    copies = {name: _pinned(tensor) for name, tensor in tensors.items()}
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Arrays:
        """Holds no tensor of the device: their memory is free for the next pass."""
        arrived.synchronize()  # without the interpreter's lock, so that another thread packs and launches meanwhile
        return {name: of_its_own(copy) for name, copy in copies.items()}

    return wait


def of_its_own(arrived: Tensor) -> NDArray[Any]:
    """What lies in pinned memory as an array that does not: floats of any precision as float32."""
    widened = _plain(arrived)
    copied: NDArray[Any] = (widened.clone() if widened is arrived else widened).numpy()
    return copied


def _plain(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


SHORT_TOKENS = 8  # sequences so short are the most that a pass can hold: what is computed a sequence counts then


def max_tokens(peak: Callable[[int], int | None], *, limit: int, longest: int, allowed: int) -> int:
    """Tokens of a pass whose peak stays within `allowed` bytes: `limit`, or the first of what is three quarters of the size
    before; at least `longest`.

    `peak`: bytes that a pass of so many tokens takes, or None if it failed for want of memory. Raises LoadError if a pass of
    `longest` tokens does.
    """
    size = limit
    while (taken := peak(size)) is None or taken > allowed:
        if size <= longest:
            raise LoadError(f"an input of {longest} tokens does not fit into the memory that is free: lower `max-batch-tokens`")
        size = max(longest, 3 * size // 4)
    return size


def worst_batches(spec: ModelSpec, tokens: int, longest: int) -> list[PackedBatch]:
    """Passes of so many tokens that need the most: of the longest sequences, and of as many as there can be; with all heads."""
    lengths = dict.fromkeys((min(longest, tokens), min(SHORT_TOKENS, longest)))
    rests = ([tokens % length] if tokens % length else [] for length in lengths)
    return [made_up(spec, tokens // length * [length] + rest, spec.heads) for length, rest in zip(lengths, rests, strict=True)]


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
